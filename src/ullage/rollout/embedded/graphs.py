"""Steps captured once for a ladder of row counts and replayed, also after the weights have changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ullage.rollout.embedded.state import SlotState


class Capturing(Protocol):
    """Makes a step replayable."""

    nbytes: int

    def __call__(self, step: Callable[[], object]) -> Callable[[], None]: ...

    def forget(self) -> None: ...


class Kind(NamedTuple):
    """What is fixed in a graph."""

    rows: int
    truncates: bool
    """Some row's sampling has a top-p or top-k."""
    shares: bool
    """Some rows begin with the same pages."""


LEAST_RUNG = 16
"""Fewer rows save hardly any time, all weights have to be read for one as well, and every graph takes memory."""


def rung_for(count: int, slots: int) -> int:
    """The fewest rows, of those that are captured, that hold so many samples: 16, 32, 48, 64, 96, 128 ... slots."""
    rung = LEAST_RUNG
    while rung < count:
        rung = rung * 3 // 2 if rung >= 32 and rung & (rung - 1) == 0 else 1 << rung.bit_length()
    return min(rung, slots)


class Graphs:
    """Replays of steps by their kind; steps run as they are where they cannot be captured.

    Args:
        capture: None: on a device without graphs.
        say: one line for the user.
    """

    def __init__(self, capture: Capturing | None, say: Callable[[str], None]) -> None:
        self._capture = capture
        self._say = say
        self._replays: dict[Kind, Callable[[], None]] = {}
        self._addresses = 0

    @property
    def enabled(self) -> bool:
        return self._capture is not None

    @property
    def nbytes(self) -> int:
        """Memory that the graphs keep to themselves."""
        return 0 if self._capture is None else self._capture.nbytes

    def check(self, tensors: Iterable[Tensor]) -> None:
        """Before replaying: what a graph reads must lie where it lay. Graphs of what has moved are forgotten."""
        if self._capture is None:
            return
        addresses = hash(tuple(tensor.data_ptr() for tensor in tensors))
        if self._replays and addresses != self._addresses:
            self._say("weights have moved in memory: the decoding graphs are captured again")
            self._replays.clear()
            self._capture.forget()
        self._addresses = addresses

    def replay_of(self, kind: Kind, state: SlotState, step: Callable[[], object]) -> Callable[[], None] | None:
        """What replays the step, captured now if it is the first of its kind; None where it has to run as it is."""
        if self._capture is None:
            return None
        if kind not in self._replays:
            kept = state.saved()
            state.stop_all()
            try:
                self._replays[kind] = self._capture(step)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reason = str(error.__context__ or error).splitlines()[0]
                self._say(f"decoding goes on without CUDA graphs, and slower: {reason}")
                self._replays.clear()
                self._capture = None
                return None
            finally:
                state.restore(kept)
        return self._replays[kind]
