"""Weights that wait in host memory while no phase uses them: reference, critic, reward model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ullage.engine.gradients import views_of
from ullage.engine.streams import Mark, SideStream, host_buffer


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
        self._stream = SideStream(device)
        self._arriving: list[Tensor] = []
        """On the device or on their way, in the order of the groups."""
        self._arrived = Mark()
        for group, flat in self._groups:
            for p, view in zip(group, views_of(flat, group), strict=True):
                view.copy_(p.data)
                p.data = view

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return sum(flat.nbytes for _, flat in self._groups)

    def bring(self) -> None:
        """Let them come beside whatever is computed meanwhile."""
        if self._arriving:
            return
        self._arriving = [torch.empty(flat.shape, dtype=flat.dtype, device=self.device) for _, flat in self._groups]
        self._stream.wait_for_main()  # the memory may have been another's until now
        with self._stream.use():
            for (_, home), flat in zip(self._groups, self._arriving, strict=True):
                flat.copy_(home, non_blocking=True)
                self._stream.keep_until_done(flat)
        self._arrived = self._stream.mark()

    def leave(self) -> None:
        """Forget what was brought and is not needed."""
        self._arriving = []

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the weights are on the device."""
        self.bring()
        self._stream.hold_main(self._arrived)
        visiting, self._arriving = self._arriving, []
        for (group, _), flat in zip(self._groups, visiting, strict=True):
            _point(group, flat)
        try:
            yield
        finally:
            for (group, home), flat in zip(self._groups, visiting, strict=True):
                if self.trained:
                    home.copy_(flat)
                _point(group, home)


class Ahead:
    """Brings the weights of the phase that comes next while the one before it runs, where both fit.

    Which phase follows which is learned from the first time: a run repeats its phases in one order.

    Args:
        room: bytes that a phase leaves free.
    """

    def __init__(self, room: Callable[[str], int]) -> None:
        self.brought: dict[str, int] = {}
        """Bytes that came while a phase ran, by that phase."""
        self._room = room
        self._parked: dict[str, Parked] = {}
        self._followers: dict[str, str] = {}
        self._before: str | None = None
        self._coming: str | None = None

    def register(self, phase: str, parked: Parked) -> None:
        """Its weights are what this phase needs."""
        self._parked[phase] = parked

    def enter(self, phase: str | None) -> None:
        """A phase begins, or goes on after one that lay inside it; None: what is between phases."""
        if phase is None:
            return
        if self._coming not in (None, phase):  # another phase than last time
            self._parked[self._coming].leave()
        self._coming = None
        if phase in self._parked and self._before is not None:
            self._followers[self._before] = phase
        self._before = phase
        follower = self._followers.get(phase)
        if follower is not None and (size := self._parked[follower].nbytes) <= self._room(phase):
            self._parked[follower].bring()
            self._coming = follower
            self.brought[phase] = size


def _point(group: list[Tensor], flat: Tensor) -> None:
    for p, view in zip(group, views_of(flat, group), strict=True):
        p.data = view
