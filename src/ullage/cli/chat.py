"""`ullage chat`: talk to a run or a model. Replies go to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from ullage.base.errors import DoesNotFitError, UsageError

if TYPE_CHECKING:
    from ullage.run.conversation import Conversation, Reply

HELP = "talk to a run or a model"
_GUIDE = "Ctrl-D or /quit ends, /new starts a new conversation, Ctrl-C stops a reply"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run, a checkpoint, a model folder, a GGUF file or a Hub id")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="always the most likely token")
    how.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: 1, as in training")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest reply (default: 512)")
    parser.add_argument("--prompt", metavar="TEXT", help="say this, print the reply, and stop")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    parser.add_argument("--seed", type=int, metavar="N", help="draw the same tokens every time")
    parser.add_argument("--json", action="store_true", help="print each reply as a line of JSON, with its token ids")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    del overrides
    if arguments.temperature < 0:
        raise UsageError(f"--temperature {arguments.temperature}: must be at least 0", "0 is greedy")
    if arguments.max_tokens < 1:
        raise UsageError(f"--max-tokens {arguments.max_tokens}: must be at least 1")
    conversation = open_conversation(arguments)
    with closing(conversation):
        if arguments.prompt is None:
            return _converse(conversation, as_json=arguments.json)
        _turn(conversation, arguments.prompt, as_json=arguments.json)
        return 0


def open_conversation(arguments: argparse.Namespace) -> Conversation:
    """Load the model and decide how text reaches it."""
    from ullage.run.locate import locate

    found = locate(arguments.model)
    for warning in found.warnings:
        _say(warning)
    _say(f"loading {found.weights}")
    config = found.config

    from ullage.model.load import load_model
    from ullage.model.target import find_target
    from ullage.rollout.sampling import Sampling
    from ullage.run.conversation import Conversation

    dtype = "auto" if config is None else config.actor_rollout_ref.model.dtype
    model = load_model(found.weights, find_target("auto", 0), dtype=dtype)
    templated = bool(model.tokenizer.chat_template) and not arguments.raw
    if templated and config is not None and config.data.apply_chat_template == "never":
        _say("this run was trained without the chat template: your text is continued as it is")
        templated = False
    elif not templated and not arguments.raw:
        _say("this model has no chat template: your text is continued as it is, each time anew")
    sampling = Sampling(temperature=0.0 if arguments.greedy else arguments.temperature, max_tokens=arguments.max_tokens)
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    return Conversation(model, sampling, templated=templated, seed=seed, data=None if config is None else config.data)


def _converse(conversation: Conversation, *, as_json: bool) -> int:
    """Read a line, answer it, until the input ends."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 -- line editing and history for input()

        _say(_GUIDE)
    while (text := _read_line(interactive)) is not None:
        if text in ("/quit", "/exit"):
            break
        if text == "/new":
            conversation.forget()
        elif text.strip():
            try:
                _turn(conversation, text, as_json=as_json)
            except DoesNotFitError as error:
                if not interactive:
                    raise
                _say(f"{error.cause}; /new starts a new one")
            except KeyboardInterrupt:
                if not interactive:
                    raise
                _say("\n(stopped; this turn is forgotten)")
    return 0


def _read_line(interactive: bool) -> str | None:
    """The next line of the user, None at the end of the input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    prompt = "> "
    if not sys.stdout.isatty():  # input() would put it among the replies
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    try:
        return input(prompt)
    except EOFError:
        _say("")
        return None


def _turn(conversation: Conversation, text: str, *, as_json: bool) -> None:
    from ullage.telemetry.view import encodable

    if as_json:
        print(json.dumps(_as_json(conversation.say(text))), flush=True)
        return
    conversation.say(text, lambda piece: print(encodable(piece, sys.stdout), end="", flush=True))
    print(flush=True)


def _as_json(reply: Reply) -> dict[str, object]:
    return {
        "response": reply.text,
        "token_ids": reply.token_ids,
        "logprobs": reply.logprobs,
        "finish_reason": reply.finish_reason,
        "prompt_ids": reply.prompt_ids,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr)
