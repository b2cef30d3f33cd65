"""The device's side of the engine: prompts through the model into the cache, first tokens, windows of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ullage.model.attention import Span
from ullage.model.head import MIN_ROWS
from ullage.model.language_model import LanguageModel
from ullage.model.target import put
from ullage.rollout.embedded.cuda import Arriving, Readback
from ullage.rollout.embedded.graphs import Graphs, Kind, rung_for
from ullage.rollout.embedded.layouts import PrefillLayout
from ullage.rollout.embedded.pages import PAGE_SIZE, Pages
from ullage.rollout.embedded.sampler import ids_of
from ullage.rollout.embedded.state import SlotState
from ullage.rollout.embedded.step import append, fast_layers, has_kernels, step


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens that are to be in the cache."""

    token_ids: tuple[int, ...]
    pages: Sequence[int]


class Packed(NamedTuple):
    """Texts one after another, on the host. [T] each."""

    ids: Tensor
    positions: Tensor
    places: Tensor
    """Where in the arena a token's key and value go."""


class Decoder:
    """Model, cache and state.

    Args:
        window: steps between two looks at what was drawn.
        lag: windows that the host is behind the device.
        deterministic: passes whose shapes hang on nothing but a sample's own length, so that a GPU's products round
            alike in all company: every text by itself, always all rows.
        share_prefix: read what samples begin with in common once for all of them.
    """

    def __init__(
        self,
        model: LanguageModel,
        pages: Pages,
        state: SlotState,
        graphs: Graphs,
        *,
        slots: int,
        window: int,
        lag: int,
        deterministic: bool,
        share_prefix: bool,
    ) -> None:
        self.model, self.pages, self.state, self.graphs = model, pages, state, graphs
        self.slots, self.window, self.lag = slots, window, lag
        self._deterministic = deterministic
        # How a beginning is read rounds differently with others and alone, and others end.
        self.shares = share_prefix and not deterministic and has_kernels(model)
        """Whether `state` has to know what rows have in common."""
        self._device = model.target.device
        self._on_cpu = model.target.kind == "cpu"
        self.fast = fast_layers(model)
        self._graphs_checked = False
        self._readback = Readback(*state.drawn_of_window(rows_needed(slots, model)), at_once=lag + 2)

    def begin(self) -> None:
        """A clean state."""
        self.state.rearrange([])
        self.state.begin_window()
        self._graphs_checked = False

    def prefill(self, texts: Sequence[Text], max_tokens: int) -> list[Tensor]:
        """Write the keys and values of each; gives the hidden state of each one's last token. Whole texts at a time."""
        most = 0 if self._deterministic else max_tokens
        return [last for part in _passes(texts, most) for last in self._prefill(part)]

    def _prefill(self, texts: list[Text]) -> Sequence[Tensor]:
        # A CPU's products of few rows round differently. Writing the same twice is harmless.
        missing = MIN_ROWS - sum(len(text.token_ids) for text in texts) if self._on_cpu else 0
        rows = [*texts, *texts[:1] * -(-missing // len(texts[0].token_ids))]
        lengths = [len(text.token_ids) for text in rows]
        ends = list(accumulate(lengths))
        spans = [Span(end - length, length, ()) for end, length in zip(ends, lengths, strict=True)]
        ids, positions, places = (put(part, self._device) for part in pack(rows))
        last = put(torch.tensor(ends[: len(texts)]) - 1, self._device)
        layout = PrefillLayout(spans, self.pages.arena, places, self.model.target)
        if self.fast is not None:
            return self.fast.hidden(ids, positions, layout.attend_projected, last).unbind()
        return self.model.hidden(ids[None], positions[None], layout)[last].unbind()

    def start(self, first_row: int, hidden: list[Tensor], *, truncates: bool) -> Tensor | None:
        """Draw the first token of newcomers in the rows from `first_row` on; gives what `step` does."""
        rows = self.state.rows(first_row, first_row + len(hidden))
        fill = self.slots - len(hidden) if self._deterministic else 0
        stacked = torch.stack([*hidden, *hidden[:1] * fill])
        return append(self.model, rows, stacked, self.state.first_column, truncates=truncates)

    def run(self, count: int, steps: int, pages: int, *, truncates: bool) -> None:
        """Steps of the first `count` rows, whose longest has so many pages."""
        if steps and self.graphs.enabled:
            self._check_graphs()
            rows = self.slots if self._deterministic else rung_for(count, self.slots)
            kind = Kind(rows, truncates, self.state.shares)
            replay = self.graphs.replay_of(kind, self.state, partial(self._step, *kind))
            if replay is not None:
                for _ in range(steps):
                    replay()
                return
        for _ in range(steps):
            self.step(count, pages, truncates=truncates)

    def step(self, count: int, pages: int, *, truncates: bool) -> Tensor | None:
        """One step, not replayed; gives the ids [rows, V] that top-p and top-k left, where somebody has any."""
        rows = rows_needed(self.slots if self._deterministic else count, self.model)
        return self._step(rows, truncates, self.state.shares, pages)

    @staticmethod
    def ids_of(support: Tensor) -> list[Tensor]:
        """[rows] on the host."""
        return list(ids_of(support))

    def send(self, count: int) -> Arriving:
        """The window's tokens of the first rows to the host; a new window begins."""
        arriving = self._readback.send(*self.state.drawn_of_window(count))
        self.state.begin_window()
        return arriving

    def _check_graphs(self) -> None:
        """Graphs that read what is there; looked at once after `begin`, when the device has prompts to work on."""
        if not self._graphs_checked:
            module = self.model.module
            self.graphs.check((*module.parameters(), *module.buffers(), self.pages.arena))
            self._graphs_checked = True

    def _step(self, count: int, truncates: bool, shares: bool, pages: int | None = None) -> Tensor | None:
        rows = self.state.rows(0, count, pages)
        return step(self.model, self.pages, rows, truncates=truncates, shares=shares, fast=self.fast)


def rows_needed(count: int, model: LanguageModel) -> int:
    """Rows to compute for so many samples: a CPU's products of few rows round differently."""
    return max(count, MIN_ROWS) if model.target.kind == "cpu" else count


def pack(texts: Sequence[Text]) -> Packed:
    """By a few operations on all tokens: the device waits for the first pass. torch would wake all of its threads."""
    lengths = np.array([len(text.token_ids) for text in texts])
    tables = np.array([len(text.pages) for text in texts])
    ids, pages = _joined(text.token_ids for text in texts), _joined(text.pages for text in texts)
    starts, first_pages = (np.repeat(sizes.cumsum() - sizes, lengths) for sizes in (lengths, tables))
    positions = np.arange(len(ids)) - starts
    places = pages[first_pages + positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return Packed(*(torch.from_numpy(part) for part in (ids, positions, places)))


def _joined(parts: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(parts), np.int64)


def _passes(texts: Sequence[Text], max_tokens: int) -> Iterator[list[Text]]:
    """Whole texts in order, as many as a pass may have tokens; a longer one alone."""
    part: list[Text] = []
    room = 0
    for text in texts:
        if part and len(text.token_ids) > room:
            yield part
            part = []
        if not part:
            room = max_tokens
        part.append(text)
        room -= len(text.token_ids)
    if part:
        yield part
