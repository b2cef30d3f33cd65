"""The KV arena and its pages: one tensor, pages handed out and counted, prompts of a group stored once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ullage.model.language_model import LanguageModel
from ullage.model.target import put

PAGE_SIZE = 16
"""Tokens per page."""
COPIED_AT_ONCE = 32
"""Pages: what is on its way takes as much memory again."""


class Pages:
    """Free list and reference counts; the arena's address never changes. Its last page is nobody's."""

    def __init__(self, arena: Tensor) -> None:
        self.arena = arena
        self.total = arena.shape[2] - 1
        self.scratch = self.total
        """Where rows without a sample write."""
        self._free = list(range(self.total - 1, -1, -1))
        self._users = [0] * self.total
        self.most_used = 0
        """Pages that were taken at once, at most; whoever wants to know sets it back."""

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), "admission must reserve before taking"
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        self.most_used = max(self.most_used, self.total - len(self._free))
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        for page in pages:
            self._users[page] += 1

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Samples' own copies of the last, partly filled pages of their prompts."""
        for start in range(0, len(sources), COPIED_AT_ONCE):
            part = slice(start, start + COPIED_AT_ONCE)
            whence, where = (put(torch.tensor(pages[part]), self.arena.device) for pages in (sources, targets))
            self.arena.index_copy_(2, where, self.arena.index_select(2, whence))


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def make_arena(model: LanguageModel, num_pages: int, lent: Tensor | None = None) -> tuple[Tensor, bool]:
    """[layers, 2, pages, page size, kv heads, head size], and whether it lies in memory that another phase owns.

    One page more than asked for, for rows without a sample. Whatever lies in the memory, nobody reads it before it is
    written: attention looks at no token that is not there.
    """
    layers, heads, head_size = model.cache_shape
    shape = (layers, 2, num_pages + 1, PAGE_SIZE, heads, head_size)
    size = math.prod(shape) * model.dtype.itemsize
    if lent is not None and lent.device == model.target.device and lent.nbytes >= size:
        return lent.view(torch.uint8)[:size].view(model.dtype).view(shape), True
    return torch.empty(shape, dtype=model.dtype, device=model.target.device), False
