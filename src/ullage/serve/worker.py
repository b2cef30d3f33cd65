"""The thread that drives the engine: requests come in and leave between windows, what is drawn goes to their owners."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from ullage.base.errors import ServiceError
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.requests import Drawn
from ullage.rollout.sampling import GroupRequest, Sampling

Delivered = Drawn | Exception
"""What a request gets: its samples piece by piece, or what ended them all."""
Deliver = Callable[[Delivered], None]
"""Called in the worker's thread; returns at once and never raises."""


class StoppingError(ServiceError):
    """The worker takes no more requests, and ends those it has."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", "ask again once it is back")


@dataclass(frozen=True, slots=True)
class Status:
    """What the engine is doing."""

    running: int
    """Samples that have a slot."""
    waiting: int
    """Samples that wait for one."""
    slots: int
    drawn_tokens: int
    """Since the start."""
    free_pages: int
    total_pages: int


@dataclass(slots=True)
class _Task:
    """One group of samples in the session."""

    deliver: Deliver
    unstarted: set[int]
    running: set[int]


class Worker:
    """Owns the engine from construction to `close`; its methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.failure: Exception | None = None
        """What broke the engine for good."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called then, in the worker's thread."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tasks: dict[Hashable, _Task] = {}
        """Touched by the worker's thread alone, like the session."""
        self._lock = threading.Lock()
        self._waiting = self._running = self._num_tokens = 0
        """Of samples; a request counts from the moment it is submitted."""
        self._ended = False
        self._session = engine.session()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, request: GroupRequest, sampling: Sampling, deliver: Deliver) -> None:
        """Draw the samples; `deliver` sees every piece of each until its last one, which has a finish reason."""
        with self._lock:
            if not self._ended:
                self._waiting += len(request.seeds)
                self._inbox.put(lambda: self._admit(key, request, sampling, deliver))
                return
        deliver(StoppingError())

    def cancel(self, keys: Iterable[Hashable]) -> None:
        """Free what these hold before the next window; what is no longer there is fine."""
        wanted = tuple(keys)
        self._inbox.put(lambda: self._drop(wanted))

    def abandon(self) -> None:
        """End every answer now."""
        self._inbox.put(self._abandon)

    def close(self) -> None:
        """End every answer, give everything back, and wait for the thread."""
        self._inbox.put(self._end)
        self._thread.join()

    @property
    def status(self) -> Status:
        pages = self._engine.pages
        with self._lock:
            return Status(self._running, self._waiting, self._engine.slots, self._num_tokens, pages.free, pages.total)

    def _work(self) -> None:
        while not self._ended:
            try:
                self._listen()
                if not self._session.idle:
                    self._hand_out(self._session.advance())
            except Exception as error:  # noqa: BLE001 -- whatever it was: those who wait are told, and others served
                self._recover(error)
        self._tell_all(StoppingError())
        while not self._inbox.empty():
            self._inbox.get()()
        if self.failure is None:
            self._session.close()

    def _listen(self) -> None:
        """Read the inbox; with nothing to draw, wait for it."""
        if self._session.idle:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _admit(self, key: Hashable, request: GroupRequest, sampling: Sampling, deliver: Deliver) -> None:
        task = self._tasks[key] = _Task(deliver, set(range(len(request.seeds))), set())
        if self._ended:
            self._forget(key)
            deliver(StoppingError())
            return
        try:
            self._session.submit(key, request, sampling)
        except Exception as error:  # noqa: BLE001 -- a request that the session refuses is nobody else's concern
            self._forget(key)
            task.deliver(error)

    def _forget(self, key: Hashable) -> bool:
        """Whether it was still there."""
        task = self._tasks.pop(key, None)
        if task is None:
            return False
        with self._lock:
            self._waiting -= len(task.unstarted)
            self._running -= len(task.running)
        return True

    def _drop(self, keys: tuple[Hashable, ...]) -> None:
        for key in keys:
            if self._forget(key):
                self._session.cancel(key)

    def _hand_out(self, drawn: list[Drawn]) -> None:
        for piece in drawn:
            task = self._tasks[piece.key]
            with self._lock:
                self._num_tokens += len(piece.token_ids)
                if piece.index in task.unstarted:
                    task.unstarted.remove(piece.index)
                    task.running.add(piece.index)
                    self._waiting -= 1
                    self._running += 1
                if piece.finish_reason is not None:
                    task.running.remove(piece.index)
                    self._running -= 1
            if not task.running and not task.unstarted:
                del self._tasks[piece.key]
            task.deliver(piece)

    def _abandon(self) -> None:
        keys = tuple(self._tasks)
        self._tell_all(StoppingError())
        for key in keys:
            self._session.cancel(key)

    def _tell_all(self, error: Exception) -> None:
        for key, task in list(self._tasks.items()):
            self._forget(key)
            task.deliver(error)

    def _recover(self, error: Exception) -> None:
        """A session that failed half-way may hold anything: a new one takes its place."""
        self._tell_all(error)
        try:
            self._session.close()
            self._session = self._engine.session()
        except Exception:  # noqa: BLE001 -- the engine is broken, and the first error says why
            self.failure = error
            self._end()
            self.on_failure()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
