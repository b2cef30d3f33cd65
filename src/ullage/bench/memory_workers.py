"""Pieces of work in processes of their own, as many at once as memory has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

Row = dict[str, Any]


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
    jobs: Sequence[Job], workers: int, room: Room, seconds_left: Callable[[], float], *, fresh: bool = False
) -> Iterator[Outcome]:
    """Those that there is time for, the largest first; the order of outcomes is by chance.

    `fresh`: each in a process that has done nothing before.
    """
    waiting = sorted(jobs, key=lambda job: job.device_bytes, reverse=True)
    running: dict[Future[Row], Job] = {}
    # A process that has seen CUDA cannot be forked.
    spawn, once = get_context("spawn"), 1 if fresh else None
    with ProcessPoolExecutor(workers, mp_context=spawn, max_tasks_per_child=once) as pool:
        while waiting or running:
            for job in list(waiting):
                if len(running) < workers and room.has(job, list(running.values())) and seconds_left() >= job.seconds:
                    running[pool.submit(job.work)] = job
                    waiting.remove(job)
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                error = future.exception()
                assert error is None or isinstance(error, Exception), "a worker is not interrupted"
                yield running.pop(future), error or future.result()
