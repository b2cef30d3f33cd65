"""Talking to a model: turns through the chat template, or plain text that is continued, sampled by the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ullage.base.errors import DoesNotFitError
from ullage.base.seeds import derive
from ullage.config.tree import Data
from ullage.data.chat import tokenise
from ullage.model.language_model import LanguageModel
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sample, Sampling
from ullage.telemetry.view import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of the model."""

    prompt_ids: tuple[int, ...]
    sample: Sample
    text: str
    """As decoded: not yet safe for a terminal."""


class Conversation:
    """The messages so far. Every turn is rendered and prefilled anew: exactly what a training prompt would be."""

    def __init__(
        self, model: LanguageModel, sampling: Sampling, *, templated: bool, seed: int, data: Data | None = None
    ) -> None:
        self.model = model
        self.sampling = sampling
        self.seed = seed
        self.templated = templated
        data = data or Data()
        wanted = (
            {"apply_chat_template": "auto"} if templated else {"apply_chat_template": "never", "system_prompt": None}
        )
        self.data = data.model_copy(update=wanted)
        self.messages: list[dict[str, Any]] = []
        self._num_turns = 0

    def say(self, text: str, on_text: Callable[[str], None] = lambda text: None) -> Reply:
        """The model's reply; `on_text` sees it in pieces that are safe to print. Without a template, no memory."""
        messages = [*self.messages, {"role": "user", "content": text}]
        [prompt] = tokenise(
            [messages if self.templated else text], self.data, self.model.tokenizer, places=["the conversation"]
        )
        sampling = replace(self.sampling, max_tokens=self._room(len(prompt)))
        stream = TextStream(self.model.tokenizer)
        engine = Engine(self.model, slots=1, max_length=len(prompt) + sampling.max_tokens)
        [sample] = engine.generate(
            [GroupRequest(prompt=prompt, seeds=(derive(self.seed, "chat", self._num_turns),))],
            sampling,
            on_token=lambda group, index, token: on_text(stream.add(token)),
        )
        on_text(stream.rest())
        reply = self.model.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        if self.templated:
            self.messages = [*messages, {"role": "assistant", "content": reply}]
        self._num_turns += 1
        return Reply(prompt_ids=prompt, sample=sample, text=reply)

    def forget(self) -> None:
        """Begin anew."""
        self.messages = []

    def _room(self, prompt_tokens: int) -> int:
        """Tokens the reply may have: as many as wanted, within the positions the model knows."""
        positions = getattr(self.model.module.config.get_text_config(), "max_position_embeddings", None)
        room = (
            self.sampling.max_tokens if positions is None else min(self.sampling.max_tokens, positions - prompt_tokens)
        )
        if room < 1:
            raise DoesNotFitError(
                f"the conversation has {prompt_tokens} tokens, the model's context is {positions}", "start a new one"
            )
        return room


class TextStream:
    """Tokens in, printable text out as soon as it is certain."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 -- transformers' own
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """What this token adds; nothing while it may be the first half of a character."""
        self._tokens.append(token)
        text = self._text()
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._advance(text)

    def rest(self) -> str:
        """What was held back. A tokenizer that revises earlier text gets the whole of it on a new line."""
        text = self._text()
        return self._advance(text) if text.startswith(self._shown) else f"\n{text}"

    def _text(self) -> str:
        return printable(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def _advance(self, text: str) -> str:
        if not text.startswith(self._shown):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new
