"""The reward model: a classifier with one output that reads whole conversations, frozen, on the run's own device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import PreTrainedModel

from ullage.base.user_code import raised
from ullage.batch.pack import Limits
from ullage.data.columns import Given
from ullage.engine.replay import Extent, Replayer, Replays
from ullage.model.classifier import classify, load_classifier, max_length
from ullage.model.target import Target


class RewardModel:
    """Scores texts in micro-batches of at most `max_tokens`, padding included."""

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: Any,  # noqa: ANN401 -- transformers' own
        target: Target,
        *,
        max_tokens: int,
        replays: Replays | None = None,
    ) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.target = target
        self._replayer = Replayer(Limits(max_tokens=max_tokens), replays)
        self.limit = min(max_tokens, max_length(module, tokenizer) or max_tokens)
        """Tokens of the longest conversation that is scored; none is ever cut."""
        self.resident: Callable[[], AbstractContextManager[object]] = nullcontext
        """Opened around its work: brings the weights where they are needed, if they wait elsewhere."""

    def scores(self, prompts: Sequence[Given], responses: Sequence[str]) -> list[float | str]:
        """For each response its score, or in words why it has none: too long, or refused by the chat template."""
        found: list[float | str] = ["" for _ in responses]
        token_ids: dict[int, list[int]] = {}
        for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            read = self._read(prompt, response)
            if isinstance(read, str):
                found[index] = read
            else:
                token_ids[index] = read
        with self.resident():
            numbers = self._replayer.run("the reward model", _extent(token_ids), lambda: self._numbers(token_ids))
        for index, number in numbers.items():
            found[index] = number
        return found

    def _numbers(self, token_ids: dict[int, list[int]]) -> dict[int, float]:
        """By key, the score of each text."""
        lengths = {key: len(ids) for key, ids in token_ids.items()}
        numbers: dict[int, float] = {}
        for members in micro_batches(lengths, self._replayer.limits.max_tokens):
            scores = classify(self.module, [token_ids[key] for key in members], self.target)
            numbers |= zip(members, scores, strict=True)
        return numbers

    def _read(self, prompt: Given, response: str) -> list[int] | str:
        """The token ids of a conversation, or why it cannot be scored."""
        try:
            text, templated = self._text(prompt, response)
        except Exception as error:  # noqa: BLE001 -- a template is a program of the model's author: it may raise anything
            return f"the chat template of the reward model {raised(error, None)}"
        # A template writes its own special tokens; other text gets the tokenizer's usual ones.
        ids: list[int] = self.tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"]
        if not ids:
            return "the reward model was given an empty text"
        if len(ids) > self.limit:
            return f"the conversation has {len(ids)} tokens, the reward model reads at most {self.limit}"
        return ids

    def _text(self, prompt: Given, response: str) -> tuple[str, bool]:
        """The conversation with its reply, and whether a chat template wrote it."""
        if isinstance(prompt, str):
            return prompt + response, False
        messages = completed(prompt, response)
        if self.tokenizer.chat_template:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False)), True
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages), False


def load_reward_model(
    path: str,
    target: Target,
    *,
    tokenizer_path: str | None = None,
    dtype: str = "auto",
    max_tokens: int,
    replays: Replays | None = None,
) -> RewardModel:
    """A reward model from a folder or a Hub id."""
    module, tokenizer = load_classifier(path, target, tokenizer_path=tokenizer_path, dtype=dtype)
    return RewardModel(module, tokenizer, target, max_tokens=max_tokens, replays=replays)


def completed(messages: Sequence[dict[str, Any]], response: str) -> list[dict[str, Any]]:
    """The messages and the reply; one that continues the assistant's own last message becomes part of it."""
    texts = [{**message, "content": _content(message.get("content"))} for message in messages]
    if texts[-1]["role"] == "assistant":
        return [*texts[:-1], {**texts[-1], "content": texts[-1]["content"] + response}]
    return [*texts, {"role": "assistant", "content": response}]


def _content(content: Any) -> str:  # noqa: ANN401 -- text, a list of text parts, or null beside tool calls
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _extent(token_ids: dict[int, list[int]]) -> Extent:
    """With the padding of a single batch of them all."""
    longest = max(map(len, token_ids.values()), default=0)
    return Extent(longest, longest * len(token_ids), len(token_ids))


def micro_batches(lengths: dict[int, int], max_tokens: int) -> Iterator[list[int]]:
    """Keys by falling length, as many at a time as fit when all are padded to the longest."""
    members: list[int] = []
    for key in sorted(lengths, key=lambda key: -lengths[key]):
        if members and lengths[members[0]] * (len(members) + 1) > max_tokens:
            yield members
            members = []
        members.append(key)
    if members:
        yield members
