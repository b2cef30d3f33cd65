"""Pieces of work in processes of their own, as many at once as memory has room for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

Row = dict[str, Any]
SPARE = 3
"""Processes that load while others work."""


@dataclass(frozen=True, slots=True)
class Job:
    """What has to be done, and the memory that it must find."""

    work: Callable[[], Row]
    number: int
    seconds: float
    """That it takes, roughly."""
    device_bytes: int
    host_bytes: int
    factor: float | None = None
    """Of a cap."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for all that runs at once."""

    device_bytes: int
    host_bytes: int

    def has(self, job: Job, running: Sequence[Job]) -> bool:
        """What needs more than there is runs alone."""
        together = [job, *running]
        return not running or (
            sum(each.device_bytes for each in together) <= self.device_bytes
            and sum(each.host_bytes for each in together) <= self.host_bytes
        )


Outcome = tuple[Job, Row | Exception]
"""A row, or what went wrong."""


def one_by_one(jobs: Sequence[Job], seconds_left: Callable[[], float]) -> Iterator[Outcome]:
    """Those that there is time for."""
    for job in jobs:
        if seconds_left() < job.seconds:
            return
        try:
            yield job, job.work()
        except Exception as error:  # noqa: BLE001 -- whatever is wrong with it is told when the others are done
            yield job, error


def side_by_side(
    jobs: Sequence[Job],
    workers: int,
    room: Room,
    seconds_left: Callable[[], float],
    *,
    load: Callable[[], object] = dict,
) -> Iterator[Outcome]:
    """Those that there is time for, the largest first; the order of outcomes is by chance.

    Each in a process that has done nothing before, but `load` what the work needs: that takes as long as the work, and
    memory does not wait for it. A process keeps its memory until it has ended, above all one that ran out of it.
    """
    waiting = sorted(jobs, key=lambda job: job.device_bytes, reverse=True)
    running: dict[Future[Row], tuple[Job, _Process]] = {}
    ending: dict[Future[None], Job] = {}
    ready = deque(_started(load) for _ in range(min(len(jobs), workers + SPARE)))
    ends = ThreadPoolExecutor(workers + SPARE)
    try:
        while waiting or running or ending:
            together = [*(job for job, _ in running.values()), *ending.values()]
            for job in list(waiting):
                if len(running) < workers and room.has(job, together) and seconds_left() >= job.seconds:
                    future, process = _submitted(job, ready.popleft(), load)
                    running[future] = job, process
                    together.append(job)
                    waiting.remove(job)
            if not running and not ending:
                return
            watched: set[Future[Any]] = {*running, *ending}
            done = wait(watched, return_when=FIRST_COMPLETED).done
            for ended in done & ending.keys():
                del ending[ended]
            for future in done & running.keys():
                job, process = running.pop(future)
                ending[ends.submit(process.pool.shutdown)] = job
                if len(ready) < len(waiting):
                    ready.append(_started(load))
                error = future.exception()
                assert error is None or isinstance(error, Exception), "a worker is not interrupted"
                yield job, error or future.result()
    finally:
        ends.shutdown(wait=False)
        for process in [*ready, *(process for _, process in running.values())]:
            process.pool.shutdown(wait=False, cancel_futures=True)


def _submitted(job: Job, process: _Process, load: Callable[[], object]) -> tuple[Future[Row], _Process]:
    """To the process or, where that has died before it had anything to do, to another one."""
    if isinstance(process.loading.exception(), BrokenExecutor):
        process.pool.shutdown(wait=False)
        return _submitted(job, _started(load), load)
    return process.pool.submit(job.work), process


class _Process(NamedTuple):
    pool: ProcessPoolExecutor
    """Of one."""
    loading: Future[object]


def _started(load: Callable[[], object]) -> _Process:
    """A process that has seen CUDA cannot be forked."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    return _Process(pool, pool.submit(load))
