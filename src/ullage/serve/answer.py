"""An order in the worker's hands: tokens come in as they are drawn, pieces of its choices come out as text."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from ullage.base.seeds import derive
from ullage.rollout.embedded.requests import Drawn
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.serve.text import StopStrings, TextStream
from ullage.serve.worker import Deliver, Delivered, Worker

_ORDERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to draw."""

    prompts: tuple[tuple[int, ...], ...]
    samples: int = 1
    """Of each prompt."""
    sampling: Sampling
    seed: int
    """The same order with the same seed gives the same tokens; a choice's depend on no other choice."""
    stops: tuple[str, ...] = ()

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one window added to one choice."""

    choice: int
    """Prompts in order, the samples of each together."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None


class _Choice:
    """One completion as it grows."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:  # noqa: ANN401 -- transformers' own
        self._text = TextStream(tokenizer)
        self._stops = StopStrings(stops) if stops else None
        self.finished = False

    def take(self, number: int, drawn: Drawn) -> Piece:
        text, used = self._read(drawn.token_ids)
        reason = drawn.finish_reason
        if reason is not None and not self._stopped:
            text += self._end()
        if self._stopped:
            reason = "stop"
        self.finished = reason is not None
        return Piece(
            choice=number,
            text=text,
            token_ids=tuple(drawn.token_ids[:used]),
            logprobs=tuple(drawn.logprobs[:used]),
            finish_reason=reason,
        )

    @property
    def _stopped(self) -> bool:
        return self._stops is not None and self._stops.found

    def _read(self, tokens: list[int]) -> tuple[str, int]:
        """The text that these make certain, and how many of them count: those up to the end of a stop string."""
        if self._stops is None:
            return self._text.add(tokens), len(tokens)
        shown = ""
        for used, token in enumerate(tokens, start=1):
            shown += self._stops.add(self._text.add([token]))
            if self._stops.found:
                return shown, used
        return shown, len(tokens)

    def _end(self) -> str:
        rest = self._text.rest()
        return rest if self._stops is None else self._stops.add(rest) + self._stops.rest()


class Answer:
    """Submits an order; its owner passes what is delivered to `take`, all in one thread."""

    def __init__(
        self,
        order: Order,
        worker: Worker,
        tokenizer: Any,  # noqa: ANN401 -- transformers' own
        deliver: Deliver,
    ) -> None:
        self._worker = worker
        self._choices = [_Choice(tokenizer, order.stops) for _ in range(order.num_choices)]
        self._unfinished = order.num_choices
        self._first: dict[Hashable, int] = {}
        """Number of a group's first choice."""
        number = next(_ORDERS)
        seeds = [derive(order.seed, "serve", sample) for sample in range(order.samples)]
        # Samples of a group share their prompt's pages, but leave together: a stop string ends one of them alone.
        size = 1 if order.stops else order.samples
        for place, prompt in enumerate(order.prompts):
            for start in range(0, order.samples, size):
                key = (number, place, start)
                self._first[key] = place * order.samples + start
                request = GroupRequest(prompt=prompt, seeds=tuple(seeds[start : start + size]))
                worker.submit(key, request, order.sampling, deliver)

    def take(self, delivered: Delivered) -> Piece | None:
        """The piece that was drawn, None if its choice has ended already; raises what ended the worker's part."""
        if isinstance(delivered, Exception):
            raise delivered
        number = self._first[delivered.key] + delivered.index
        choice = self._choices[number]
        if choice.finished:
            return None
        piece = choice.take(number, delivered)
        self._unfinished -= choice.finished
        if choice.finished and delivered.finish_reason is None:
            self._worker.cancel([delivered.key])
        return piece

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    def cancel(self) -> None:
        """Free what is still held; safe at any time."""
        if not self.finished:
            self._worker.cancel(self._first)
