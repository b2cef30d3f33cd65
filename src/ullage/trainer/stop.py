"""Stopping when asked: SIGTERM and Ctrl-C save a checkpoint and end with code 75 or 130; a second signal ends at once.

Light to import: the handlers are in place before torch is loaded.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from ullage.base.communicator import Communicator
from ullage.base.errors import InterruptedRunError, PreemptedError, UllageError

if TYPE_CHECKING:
    from ullage.trainer.state import Keeper

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STDERR = 2
SHOW_CURSOR = b"\x1b[?25h"


class Stop:
    """A flag set by signals, looked at between steps on all ranks and, with one rank, between tokens."""

    def __init__(self, *, patient: bool = False) -> None:
        self.requested: int | None = None
        """The signal that asked."""
        self.phase: str | None = None
        """Where the run was when it was asked."""
        self.current_phase: Callable[[], str | None] = lambda: None
        self._patient = patient
        """A scheduler may signal the launcher and its ranks alike; then only the launcher counts how often."""
        self._alone = True
        self._deferred = False

    @contextmanager
    def installed(self) -> Iterator[Stop]:
        """Listen for signals; also for those that came before, where they were blocked until now."""
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may have handlers; whoever runs us in another one stops us otherwise
            return
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.requested is None:
            self.requested, self.phase = number, self.current_phase()
        elif not self._patient:  # whoever asks twice will not wait; the last checkpoint is whole
            if os.isatty(STDERR):
                os.write(STDERR, SHOW_CURSOR)  # the live view has no time to give the terminal back
            os._exit(128 + number)

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
        """A part that must be finished once begun: weights change in it, or its results belong to the step."""
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
    return kind(
        f"{name}: stopped after step {keeper.step}, checkpoint saved", f"continue with: {keeper.resume_command}"
    )
