"""Given answers as token ids, ended as the model ends its own: what supervised training learns from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ullage.base.errors import DataError
from ullage.config.tree import Data
from ullage.data.chat import Tokenizer, as_chat, render
from ullage.data.prompts import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt and the answer to learn."""

    prompt: Prompt
    response: tuple[int, ...]
    """Token ids, end token included unless the answer was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationSet:
    demonstrations: tuple[Demonstration, ...]
    num_overlong: int
    """Answers over data.max_response_length: dropped or cut, as data.overlong_prompts says of prompts."""


def demonstrations_of(
    prompts: Sequence[Prompt], config: Data, tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> DemonstrationSet:
    """Every prompt with the token ids of its completion."""
    limit = config.max_response_length
    found, num_overlong = [], 0
    for prompt in prompts:
        response = _response(prompt, config, tokenizer, stop_ids)
        if len(response) > limit:
            num_overlong += 1
            if config.overlong_prompts == "error":
                raise DataError(
                    f"{prompt.where}: its completion has {len(response)} tokens, over data.max_response_length={limit}",
                    f"set data.max_response_length={len(response)}, or data.overlong_prompts=drop (or right, to cut)",
                )
            if config.overlong_prompts == "drop":
                continue
        found.append(Demonstration(prompt=prompt, response=response[:limit]))
    if not found:
        raise DataError(
            f"all {num_overlong} completions are longer than data.max_response_length={limit}",
            "raise data.max_response_length, or cut them with data.overlong_prompts=right",
        )
    return DemonstrationSet(demonstrations=tuple(found), num_overlong=num_overlong)


def _response(prompt: Prompt, config: Data, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> tuple[int, ...]:
    if prompt.completion is None:
        raise DataError(
            f"{prompt.where}: no completion to learn from",
            "add a column `completion`, end `messages` with the assistant's reply, "
            "or name the column: data.columns.completion=<column>",
        )
    ids = _encode(_text(prompt, prompt.completion, config, tokenizer), tokenizer)
    end = next((place for place, token in enumerate(ids) if token in stop_ids), None)
    if end is not None:  # what a template writes after the end of its turn is never sampled
        return tuple(ids[: end + 1])
    own: Any = getattr(tokenizer, "eos_token_id", None)
    return (*ids, own if own in stop_ids else min(stop_ids))


def _text(prompt: Prompt, completion: str, config: Data, tokenizer: Tokenizer) -> str:
    """The reply as the chat template closes it; the bare reply of plain text, or where a template rewrites the past."""
    where = prompt.where
    chat = as_chat(prompt.prompt, config, where)
    if chat is None or chat[-1]["role"] == "assistant":
        return completion
    opened = render(chat, config, tokenizer, where)
    closed = render([*chat, {"role": "assistant", "content": completion}], config, tokenizer, where, open_end=False)
    return closed.removeprefix(opened) if closed.startswith(opened) else completion


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    encoded: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return encoded
