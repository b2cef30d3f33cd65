"""All that scores a completion outside the trainer, as one: functions in worker processes, services over HTTP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from ullage.config.tree import Reward, RewardFunction
from ullage.rewards.pool import Request, RewardPool, Score, distinct
from ullage.rewards.signatures import SERVICES

if TYPE_CHECKING:
    from ullage.rewards.service import Desk, Service


class Panel:
    """The reward functions of a config. There may be none: then a reward model says what an answer is worth."""

    def __init__(self, config: Reward) -> None:
        functions = [function for function in config.functions if not is_service(function)]
        remote = [function for function in config.functions if is_service(function)]
        services = _open(remote, config) if remote else []  # before the workers: what is wrong with them shows at once
        self._pool = RewardPool(config.model_copy(update={"functions": functions})) if functions else None
        labels = iter(self._pool.labels if self._pool else [])
        lines = iter(self._pool.descriptions if self._pool else [])
        self._desks = _staffed(services, remote, self._pool.labels if self._pool else [])
        desks = iter(self._desks)
        self.labels: list[str] = []
        """The functions' names in `Score.parts`, in the order of the config."""
        self.descriptions: list[str] = []
        """One line per function, for the run to print."""
        for function in config.functions:
            desk = next(desks) if is_service(function) else None
            self.labels.append(desk.label if desk else next(labels))
            self.descriptions.append(desk.description if desk else next(lines))
        self._pending: list[list[Future[Score]]] = []

    def submit(self, request: Request) -> None:
        """Queue a completion; returns at once."""
        if self._pool:
            self._pool.submit(request)
        self._pending.append([desk.submit(request) for desk in self._desks if desk.scores(request.source)])

    def collect(self) -> list[Score]:
        """Scores of everything submitted since the last call, in that order; waits for them."""
        pending, self._pending = self._pending, []
        local = self._pool.collect() if self._pool else [Score(0.0, {}, None)] * len(pending)
        return [
            summed([score, *(future.result() for future in futures)])
            for score, futures in zip(local, pending, strict=True)
        ]

    def close(self) -> None:
        """What is still queued is not scored."""
        for desk in self._desks:
            desk.close()
        if self._pool:
            self._pool.close()


def is_service(function: RewardFunction) -> bool:
    return function.path is None and function.name in SERVICES


def summed(scores: Sequence[Score]) -> Score:
    """One score of several judges' (weighted) ones; without a total where one of them has none."""
    parts = {name: value for score in scores for name, value in score.parts.items()}
    failed = [score for score in scores if score.total is None]
    if failed:
        return replace(failed[0], parts=parts)
    total = sum(score.total or 0.0 for score in scores)
    if not math.isfinite(total):
        return Score(None, parts, f"the weighted sum is {total}")
    return Score(total, parts, None, next((score.answer for score in scores if score.answer is not None), None))


# Imported where they are used: httpx takes a third of a second, and few runs ask a service.


def _open(functions: Sequence[RewardFunction], config: Reward) -> list[Service]:
    from ullage.rewards.endpoint import Endpoint
    from ullage.rewards.judge import Judge

    return [
        Judge(function.kwargs) if function.name == Judge.name else Endpoint(function.kwargs, config.timeout_seconds)
        for function in functions
    ]


def _staffed(services: Sequence[Service], functions: Sequence[RewardFunction], taken: list[str]) -> list[Desk]:
    """Threads for each service, under a name of its own."""
    if not services:
        return []
    from ullage.rewards.service import Desk

    names = distinct([*taken, *(service.name for service in services)])[len(taken) :]
    return [Desk(*parts) for parts in zip(services, names, functions, strict=True)]
