"""The KV arena and its pages: one tensor, pages handed out and counted, prompts of a group stored once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ullage.model.language_model import LanguageModel

PAGE_SIZE = 16
"""Tokens per page."""


class Pages:
    """Free list and reference counts; the arena's address never changes."""

    def __init__(self, arena: Tensor) -> None:
        self.arena = arena
        self.total = arena.shape[2]
        self._free = list(range(self.total - 1, -1, -1))
        self._users = [0] * self.total

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), "admission must reserve before taking"
        taken = [self._free.pop() for _ in range(count)]
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

    def copy(self, source: int, target: int) -> None:
        """A sample's own copy of the last, partly filled page of its prompt."""
        self.arena[:, :, target].copy_(self.arena[:, :, source])


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def make_arena(model: LanguageModel, num_pages: int, lent: Tensor | None = None) -> tuple[Tensor, bool]:
    """[layers, 2, pages, page size, kv heads, head size], and whether it lies in memory that another phase owns.

    Zeroed, and zeroed again by whoever uses lent memory: masked reads of fresh pages must stay finite.
    """
    layers, heads, head_size = model.cache_shape
    shape = (layers, 2, num_pages, PAGE_SIZE, heads, head_size)
    size = math.prod(shape) * model.dtype.itemsize
    if lent is not None and lent.device == model.target.device and lent.nbytes >= size:
        return lent.view(torch.uint8)[:size].view(model.dtype).view(shape), True
    return torch.zeros(shape, dtype=model.dtype, device=model.target.device), False
