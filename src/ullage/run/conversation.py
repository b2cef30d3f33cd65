"""Talking to a model: turns through the chat template, or plain text that is continued, drawn as `serve` draws."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ullage.base.errors import DoesNotFitError
from ullage.base.seeds import derive
from ullage.config.tree import Data
from ullage.data.chat import tokenise
from ullage.model.language_model import LanguageModel
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import Sampling
from ullage.serve.answer import Answer, Order, Piece
from ullage.serve.room import context_of
from ullage.serve.worker import Delivered, Worker
from ullage.telemetry.view import printable

_LEAST_ROOM = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of the model."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
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
        self._worker: Worker | None = None
        self._room = 0
        """Tokens that the worker's engine can hold."""

    def say(self, text: str, on_text: Callable[[str], None] = lambda text: None) -> Reply:
        """The model's reply; `on_text` sees it in pieces that are safe to print. Without a template, no memory.

        Interrupted, it leaves the conversation as it was.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        [prompt] = tokenise(
            [messages if self.templated else text], self.data, self.model.tokenizer, places=["the conversation"]
        )
        sampling = replace(self.sampling, max_tokens=self._most_tokens(len(prompt)))
        order = Order(prompts=(prompt,), sampling=sampling, seed=derive(self.seed, "chat", self._num_turns))
        pieces = self._drawn(order, on_text)
        reply = Reply(
            prompt_ids=prompt,
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
            finish_reason=pieces[-1].finish_reason or "",
            text="".join(piece.text for piece in pieces),
        )
        if self.templated:
            self.messages = [*messages, {"role": "assistant", "content": reply.text}]
        self._num_turns += 1
        return reply

    def forget(self) -> None:
        """Begin anew."""
        self.messages = []

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _drawn(self, order: Order, on_text: Callable[[str], None]) -> list[Piece]:
        delivered: queue.SimpleQueue[Delivered] = queue.SimpleQueue()
        worker = self._worker_for(len(order.prompts[0]) + order.sampling.max_tokens)
        answer = Answer(order, worker, self.model.tokenizer, delivered.put)
        shown, pieces = Shown(), []
        try:
            while not answer.finished:
                piece = answer.take(delivered.get())
                assert piece is not None, "the only choice has not ended"
                pieces.append(piece)
                on_text(shown.add(piece.text))
        finally:
            answer.cancel()
        on_text(shown.rest())
        return pieces

    def _worker_for(self, tokens: int) -> Worker:
        """One whose engine is large enough; a conversation that outgrows it gets one of at least twice the size."""
        if self._worker is None or tokens > self._room:
            self.close()
            room = max(_LEAST_ROOM, 1 << (tokens - 1).bit_length())
            self._room = max(tokens, min(room, context_of(self.model) or room))
            self._worker = Worker(Engine(self.model, slots=1, max_length=self._room))
        return self._worker

    def _most_tokens(self, prompt_tokens: int) -> int:
        """Tokens the reply may have: as many as wanted, within the positions the model knows."""
        context = context_of(self.model)
        most = self.sampling.max_tokens if context is None else min(self.sampling.max_tokens, context - prompt_tokens)
        if most < 1:
            raise DoesNotFitError(
                f"the conversation has {prompt_tokens} tokens, the model's context is {context}", "start a new one"
            )
        return most


class Shown:
    """Text in, printable text out: an escape sequence may come in several pieces."""

    def __init__(self) -> None:
        self._text = ""
        self._shown = ""

    def add(self, text: str) -> str:
        """What can be printed now."""
        self._text += text
        safe = printable(self._text)
        if not safe.startswith(self._shown):
            return ""
        new, self._shown = safe[len(self._shown) :], safe
        return new

    def rest(self) -> str:
        """Where what was printed turned out to be something else, the whole of it on a new line."""
        safe = printable(self._text)
        return "" if safe == self._shown else f"\n{safe}"
