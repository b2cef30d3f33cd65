"""Stopping when asked: SIGTERM and Ctrl-C save a checkpoint and end with code 75 or 130; a second signal ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ullage.base.communicator import Communicator
from ullage.base.errors import InterruptedRunError, PreemptedError, UllageError
from ullage.trainer.state import Keeper

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """A flag set by signals, looked at between steps on all ranks and, with one rank, between tokens."""

    def __init__(self) -> None:
        self.requested: int | None = None
        self._alone = True
        self._deferred = False

    def install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested is not None:
            os._exit(128 + number)  # asked twice: whoever asks is out of patience; the last checkpoint is whole
        self.requested = number

    def check(self, ranks: Communicator, keeper: Keeper) -> None:
        """Between steps: if any rank was asked to stop, all save and stop."""
        self._alone = ranks.size == 1
        number = int(ranks.max([float(self.requested or 0)])[0])
        if number:
            keeper.save()
            raise _stopped(number, keeper)

    def poll(self) -> None:
        """Inside a rollout: a lone rank need not finish it, since nothing has changed since the step began."""
        if self.requested is not None and self._alone and not self._deferred:
            raise _AbandonedStepError

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A part that must be finished once begun: weights change in it."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def discarding(self, keeper: Keeper) -> Iterator[None]:
        """Around a step: one abandoned in its rollout is forgotten, and the state before it is what gets saved."""
        try:
            yield
        except _AbandonedStepError:
            assert self.requested is not None, "only a signal abandons a step"
            keeper.rewind()
            keeper.save()
            raise _stopped(self.requested, keeper) from None


class _AbandonedStepError(Exception):
    """Unwinds a rollout."""


def _stopped(number: int, keeper: Keeper) -> UllageError:
    kind = PreemptedError if number == signal.SIGTERM else InterruptedRunError
    name = signal.Signals(number).name
    return kind(f"{name}: stopped after step {keeper.step}, checkpoint saved", f"continue with: {keeper.resume_command}")
