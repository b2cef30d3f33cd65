"""`ullage chat`: the tokens transformers would give, turns through the template, and text that is safe to print."""

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import closing

import pytest

from experience_samples import load
from ullage.cli import chat
from ullage.cli.main import main
from ullage.rollout.sampling import Sampling
from ullage.run.conversation import Conversation, Shown

PROMPTS = ["2+3=?", "count to ten", "5-5=?\n7*7=?", "?"]


def greedy_reply(folder, text, *, raw=False, tokens=24):
    """What transformers' own generate gives for the text, as token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": text}]
    if raw:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    out = model.generate(ids, attention_mask=ids.new_ones(ids.shape), do_sample=False, max_new_tokens=tokens)
    return ids[0].tolist(), out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("raw", [False, True], ids=["chat", "raw"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_final_generates_the_same_greedy_tokens_in_transformers(finished, prompt, raw, capsys):
    words = ["chat", str(finished), "--greedy", "--max-tokens", "24", "--prompt", prompt, "--json"]
    assert main([*words, "--raw"] if raw else words) == 0
    reply = json.loads(capsys.readouterr().out)
    prompt_ids, token_ids = greedy_reply(finished / "final", prompt, raw=raw)
    assert reply["prompt_ids"] == prompt_ids
    assert reply["token_ids"] == token_ids
    assert reply["finish_reason"] == ("stop" if token_ids[-1] == 2 else "length")


def test_only_the_reply_goes_to_stdout(tiny_model):
    """In a process of its own, as in a shell pipe."""
    command = [sys.executable, "-m", "ullage", "chat", str(tiny_model), "--greedy", "--max-tokens", "5"]
    done = subprocess.run([*command, "--prompt", "2+3=?"], capture_output=True, text=True, timeout=60)
    _, token_ids = greedy_reply(tiny_model, "2+3=?", tokens=5)
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(tiny_model).decode(token_ids, skip_special_tokens=True)
    assert (done.returncode, done.stdout) == (0, text + "\n")
    assert done.stderr == f"loading {tiny_model}\n"


def test_later_turns_see_earlier_ones(tiny_model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("2+2=?\n\n3+3=?\n/new\n4+4=?\n/quit\n5+5=?\n"))
    assert main(["chat", str(tiny_model), "--max-tokens", "3", "--seed", "5", "--json"]) == 0
    first, second, third = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    shown = [tokenizer.decode(reply["prompt_ids"]) for reply in (first, second, third)]
    assert shown == [
        "<bos>u:2+2=?\na:",
        f"<bos>u:2+2=?\na:{first['response']}<eos>u:3+3=?\na:",
        "<bos>u:4+4=?\na:",
    ]


def test_a_seed_repeats_and_another_does_not(tiny_model, capsys):
    said = []
    for seed in ("1", "1", "2"):
        main(["chat", str(tiny_model), "--prompt", "count", "--seed", seed, "--max-tokens", "20"])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_a_model_without_a_template_continues_the_text(tiny_model, tmp_path, capsys):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    assert main(["chat", str(base), "--greedy", "--prompt", "2+3=", "--max-tokens", "8", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "this model has no chat template: your text is continued as it is" in err
    assert json.loads(out)["token_ids"] == greedy_reply(tiny_model, "2+3=", raw=True, tokens=8)[1]


def test_a_conversation_that_is_full_says_so(tiny_model, capsys):
    assert main(["chat", str(tiny_model), "--prompt", "1" * 1100]) == 79
    assert "tokens, the model's context is 1024" in capsys.readouterr().err
    assert main(["chat", str(tiny_model), "--prompt", "1" * 1016, "--greedy", "--json"]) == 0
    reply = json.loads(capsys.readouterr().out)
    assert len(reply["prompt_ids"]) + len(reply["token_ids"]) <= 1024


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["no-such-model"], 66),
        (["MODEL", "--max-tokens", "0"], 2),
        (["MODEL", "--temperature", "-1"], 2),
        (["MODEL", "--greedy", "--temperature", "0.5"], 2),
        (["MODEL", "trainer.seed=3"], 2),
    ],
)
def test_mistakes_have_their_codes(tiny_model, words, code, capsys):
    assert main(["chat", *(str(tiny_model) if word == "MODEL" else word for word in words), "--prompt", "x"]) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(("  fix: ", "ullage: error: --max-tokens"))


def test_escape_sequences_never_reach_the_terminal():
    shown = Shown()
    pieces = ["a\x1b", "[3", "1mred\x1b]0;ti", "tle\x07", "b\x08c"]
    assert "".join([*map(shown.add, pieces), shown.rest()]) == "aredbc"


@pytest.fixture
def conversation(tiny_model):
    model = load(tiny_model, "float32")
    with closing(Conversation(model, Sampling(max_tokens=200, ignore_eos=True), templated=True, seed=3)) as made:
        yield made


def test_an_interrupt_stops_a_reply_and_leaves_the_conversation_as_it_was(conversation):
    pieces = []

    def interrupted(piece):
        pieces.append(piece)
        if len(pieces) == 5:
            raise KeyboardInterrupt

    before = conversation.messages
    with pytest.raises(KeyboardInterrupt):
        conversation.say("2+2=?", interrupted)
    assert conversation.messages == before
    shown = []
    reply = conversation.say("2+2=?", shown.append)
    assert "".join(shown) == reply.text
    assert "".join(pieces) == reply.text[: len("".join(pieces))], "the same turn draws the same tokens"
    status = conversation._worker.status
    assert (status.running, status.waiting) == (0, 0)


def test_a_conversation_grows_beyond_its_first_engine(conversation):
    conversation.sampling = Sampling(max_tokens=10, temperature=0.0)
    short = conversation.say("2+2=?")
    conversation.forget()
    conversation._room = 20  # as if that were all its engine could hold
    assert conversation.say("2+2=?").token_ids == short.token_ids
    assert conversation._room == 1024


def test_at_a_terminal_it_prompts_and_survives_an_interrupt(monkeypatch, capsys):
    lines = iter(["hello", "again"])

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    said = []

    class Spoken:
        def say(self, text, on_text):
            said.append(text)
            if text == "hello":
                raise KeyboardInterrupt
            on_text("fine")

        def close(self):
            said.append("closed")

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(chat, "open_conversation", lambda arguments: Spoken())
    assert main(["chat", "anything"]) == 0
    out, err = capsys.readouterr()
    assert out == "fine\n"
    assert err.splitlines()[0].startswith("Ctrl-D")
    assert "(stopped; this turn is forgotten)" in err
    assert said == ["hello", "again", "closed"]


def test_help_needs_no_torch():
    script = (
        "import sys; from ullage.cli.main import main\nmain([sys.argv[1], '--help'])\nsys.exit('torch' in sys.modules)"
    )
    for verb in ("chat", "serve", "doctor", "eval", "export", "resume"):
        done = subprocess.run([sys.executable, "-c", script, verb], capture_output=True, env=os.environ, timeout=60)
        assert done.returncode == 0, verb
