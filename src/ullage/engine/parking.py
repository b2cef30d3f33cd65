"""Weights that wait in host memory while no phase uses them: reference, critic, reward model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ullage.engine.gradients import views_of
from ullage.engine.streams import host_buffer


class Parked:
    """Parameters whose memory on the device lasts as long as a phase; host memory is allocated once."""

    def __init__(self, parameters: Iterable[Tensor], device: torch.device, *, trained: bool) -> None:
        self.device = device
        self.trained = trained
        """Phases change them, so they are copied back."""
        by_dtype: dict[torch.dtype, dict[int, Tensor]] = {}
        for p in parameters:  # tied weights are one
            by_dtype.setdefault(p.dtype, {})[id(p)] = p
        self._groups = [
            (list(found.values()), host_buffer(sum(p.numel() for p in found.values()), dtype, device))
            for dtype, found in by_dtype.items()
        ]
        for group, flat in self._groups:
            for p, view in zip(group, views_of(flat, group), strict=True):
                view.copy_(p.data)
                p.data = view

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(flat.nbytes for _, flat in self._groups)

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the weights are on the device."""
        visiting = [flat.to(self.device, non_blocking=True, copy=True) for _, flat in self._groups]
        for (group, _), flat in zip(self._groups, visiting, strict=True):
            _point(group, flat)
        try:
            yield
        finally:
            for (group, home), flat in zip(self._groups, visiting, strict=True):
                if self.trained:
                    home.copy_(flat)
                _point(group, home)


def _point(group: list[Tensor], flat: Tensor) -> None:
    for p, view in zip(group, views_of(flat, group), strict=True):
        p.data = view
