"""What the steps of a window read and write, on the device: one row for each sample that is being decoded.

The rows of samples come first. Nothing here is read by the host but the window's tokens and log-probs, all at once.
Shapes: S rows, P pages of the longest sequence, K steps of a window, G groups, M members.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ullage.model.target import put
from ullage.rollout.sampling import Sampling

NOTHING = -1
"""In place of a token: the row had no sample, or one that had ended."""
MEMBERS = 16
"""Rows, at most, whose shared beginning is read at once."""
LEAST_MEMBERS = 4
"""Rows, at least: there is room for no more groups."""
_NUMBERS = ("running", "length", "last", "drawn", "limit", "seed", "ignore_eos", "top_k")
_FRACTIONS = ("temperature", "top_p")


class Row(NamedTuple):
    """What a sample brings when it takes a row."""

    pages: Sequence[int]
    length: int
    """Tokens in the cache."""
    last: int
    """The token drawn last, which is not in the cache yet; of no meaning before the first."""
    drawn: int
    limit: int
    seed: int
    sampling: Sampling


class Rows(NamedTuple):
    """The first rows of the state: views, changed in place. [S] each unless said otherwise."""

    running: Tensor
    """1 while the sample goes on."""
    length: Tensor
    """Tokens in the cache."""
    last: Tensor
    drawn: Tensor
    """Tokens drawn so far: the position of the next."""
    limit: Tensor
    seed: Tensor
    ignore_eos: Tensor
    top_k: Tensor
    """At least the size of the vocabulary for no limit."""
    temperature: Tensor
    """0: greedy."""
    top_p: Tensor
    page_table: Tensor
    """[S, P] int32"""
    starts: Tensor
    """int32: tokens of its beginning that a row shares, whole pages; 0: none."""
    members: Tensor
    """[G, M] int32: rows that begin with the same pages, `NOTHING` for none; every row with a start is in one group."""
    tokens: Tensor
    """[S, 1 + K] of this window; `NOTHING` where none was drawn. A newcomer's first is in column 0."""
    logprobs: Tensor
    """[S, 1 + K]"""
    column: Tensor
    """[1] the one that is written next."""
    stop_ids: Tensor
    """[stop ids]"""


class SlotState:
    """All rows. The tensors are made once and never move."""

    def __init__(
        self,
        rows: int,
        *,
        pages: int,
        window: int,
        stop_ids: Iterable[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pages = pages
        """Of the longest sequence."""
        self.shares = False
        """Whether any rows begin with the same pages; if not, what is noted of that is out of date."""
        self._device = device
        self._numbers = torch.zeros(len(_NUMBERS), rows, dtype=torch.long, device=device)
        self._fractions = torch.ones(len(_FRACTIONS), rows, dtype=dtype, device=device)
        self._page_table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self._starts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._members = torch.full((_groups(rows), MEMBERS), NOTHING, dtype=torch.int32, device=device)
        self._tokens = torch.full((rows, 1 + window), NOTHING, device=device)
        self._logprobs = torch.zeros(rows, 1 + window, dtype=dtype, device=device)
        self._column = torch.ones(1, dtype=torch.long, device=device)
        self._stop_ids = self._put(sorted(stop_ids))
        self.first_column = torch.zeros(1, dtype=torch.long, device=device)
        """Where the first tokens of newcomers go."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def rows(self, start: int, end: int, pages: int | None = None) -> Rows:
        """Views of some rows, with the first so many pages of each."""
        part = slice(start, end)
        numbers = dict(zip(_NUMBERS, self._numbers[:, part], strict=True))
        fractions = dict(zip(_FRACTIONS, self._fractions[:, part], strict=True))
        return Rows(
            **numbers,
            **fractions,
            page_table=self._page_table[part, :pages],
            starts=self._starts[part],
            members=self._members[: _groups(end - start)],
            tokens=self._tokens[part],
            logprobs=self._logprobs[part],
            column=self._column,
            stop_ids=self._stop_ids,
        )

    def rearrange(self, order: Sequence[int]) -> None:
        """Move these rows to the front, in this order; the others are nobody's from now on."""
        count = len(order)
        if list(order) != list(range(count)):
            places = self._put(order)
            self._numbers[:, :count] = self._numbers[:, places]
            self._fractions[:, :count] = self._fractions[:, places]
            self._page_table[:count] = self._page_table[places]
        self._numbers[0, count:] = 0

    def place(self, start: int, newcomers: Sequence[Row]) -> None:
        """Give the rows from `start` on to these samples."""
        part = slice(start, start + len(newcomers))
        samplings = [row.sampling for row in newcomers]
        numbers = [
            [1, row.length, row.last, row.drawn, row.limit, row.seed, row.sampling.ignore_eos, _top_k(row.sampling)]
            for row in newcomers
        ]
        fractions = [[each.temperature, each.top_p if each.truncates else 1.0] for each in samplings]
        width = self._page_table.shape[1]
        pages = [[*row.pages, *[0] * (width - len(row.pages))] for row in newcomers]
        self._numbers[:, part] = self._put(numbers).t()
        self._fractions[:, part] = self._put(fractions, self._fractions.dtype).t()
        self._page_table[part] = self._put(pages, torch.int32)

    def grant(self, rows: Sequence[int], places: Sequence[int], pages: Sequence[int]) -> None:
        """Enter further pages: of which row, at which place of its table, which page."""
        if rows:
            entries = self._put([rows, places, pages])
            self._page_table[entries[0], entries[1]] = entries[2].int()

    def share(self, starts: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
        """Note the beginning that each of the first rows shares, and the rows of each group. No others share any."""
        self.shares = bool(groups)
        if self.shares:
            self._starts.copy_(self._put([*starts, *[0] * (len(self._starts) - len(starts))], torch.int32))
            members = [[*rows, *[NOTHING] * (MEMBERS - len(rows))] for rows in groups]
            members += [[NOTHING] * MEMBERS] * (len(self._members) - len(members))
            self._members.copy_(self._put(members, torch.int32))

    def begin_window(self) -> None:
        """Forget the tokens of the last one; those of steps are written from column 1 on."""
        self._tokens.fill_(NOTHING)
        self._column.fill_(1)

    def drawn_of_window(self, count: int) -> tuple[Tensor, Tensor]:
        """[count, 1 + K] tokens and log-probs of the first rows."""
        return self._tokens[:count], self._logprobs[:count]

    def saved(self) -> list[Tensor]:
        """What a step may change, for `restore`."""
        return [part.clone() for part in self._parts]

    def restore(self, saved: Sequence[Tensor]) -> None:
        for part, kept in zip(self._parts, saved, strict=True):
            part.copy_(kept)

    def stop_all(self) -> None:
        """A step would then write to nobody's page only."""
        self._numbers[0] = 0

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        tables = (self._page_table, self._starts, self._members)
        return self._numbers, self._fractions, *tables, self._tokens, self._logprobs, self._column

    def _put(self, values: Sequence[object], dtype: torch.dtype = torch.long) -> Tensor:
        """By way of numpy, which reads lists of numbers in a third of torch's time."""
        numbers = np.array(values, np.float64 if dtype.is_floating_point else np.int64)
        return put(torch.from_numpy(numbers).to(dtype), self._device)


def _groups(rows: int) -> int:
    return max(1, rows // LEAST_MEMBERS)


def _top_k(sampling: Sampling) -> int:
    return sampling.top_k if sampling.truncates and sampling.top_k > 0 else torch.iinfo(torch.long).max
