"""Scores completions in worker processes that may hang, crash or lie without harm to the run."""

import atexit
import contextlib
import json
import math
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

from ullage.base.errors import ConfigError, ServiceError
from ullage.base.process import WorkerLost, WorkerProcess, num_workers
from ullage.config.tree import Reward, RewardFunction

LOAD_SECONDS = 120.0
"""Limit for importing the reward functions: a user's file may import torch from a slow disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to score. Values reach the functions as JSON would have them: tuples are lists, keys are texts."""

    prompt: str | list[dict[str, Any]]
    response: str
    target: Any
    source: str
    extra: dict[str, Any]
    """The row's other columns."""
    response_length: int
    """In tokens."""
    response_ids: list[int] | None = None
    """The tokens, for TRL functions that take `completion_ids`."""


@dataclass(frozen=True, slots=True)
class Score:
    """What became of a request."""

    total: float | None
    """Weighted sum of the parts; None where the sample could not be scored."""
    parts: dict[str, float]
    """Per function, unweighted; what a function returned beside its score is under `function/name`."""
    error: str | None
    """Why there is no total."""
    answer: str | None = None
    """What the first function that tells it took for the answer; empty where it found none."""
    remedy: str = field(default="correct the reward function, or give it more reward.timeout_seconds", compare=False)
    """What to do about the error."""


class RewardPool:
    """Worker processes for the reward functions of a config; made only if every function loads."""

    def __init__(self, config: Reward) -> None:
        if not config.functions:
            raise ConfigError("reward.functions is empty", "name at least one reward function, such as {name: gsm8k}")
        self._timeout_seconds = config.timeout_seconds
        self._functions = config.functions
        self._loading = json.dumps({"functions": [_specification(function) for function in config.functions]}).encode()
        self._closing = threading.Event()
        self._jobs: queue.SimpleQueue[tuple[bytes, list[int], Future[Score]] | None] = queue.SimpleQueue()
        self._pending: list[Future[Score]] = []

        first, loaded = self._start_first()
        self.labels = distinct([reward["label"] for reward in loaded])
        """The functions' names in `Score.parts`, in the order of the config."""
        self._where = [reward["where"] for reward in loaded]
        self.descriptions: list[str] = [
            reward["description"] + terms(function) for reward, function in zip(loaded, self._functions, strict=True)
        ]
        """One line per function, for the run to print."""

        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True, name="reward")
            for worker in [first, *[None] * (num_workers(config.num_workers) - 1)]
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def submit(self, request: Request) -> None:
        """Queue a completion; returns at once."""
        assert not self._closing.is_set(), "submit() after close()"
        future: Future[Score] = Future()
        self._pending.append(future)
        asked = [index for index, function in enumerate(self._functions) if scores_source(function, request.source)]
        if not asked:  # a reward model or an environment says what it is worth
            future.set_result(Score(0.0, {}, None))
            return
        values = {own.name: getattr(request, own.name) for own in fields(request)}
        try:
            line = json.dumps({"functions": asked, **values}, default=as_json).encode()
        except (TypeError, ValueError) as error:
            future.set_result(Score(None, {}, f"the row cannot be handed to a reward function: {error}"))
        else:
            self._jobs.put((line, asked, future))

    def collect(self) -> list[Score]:
        """Scores of everything submitted since the last call, in that order; waits for them."""
        pending, self._pending = self._pending, []
        return [future.result() for future in pending]

    def close(self) -> None:
        """Kill every worker and everything it started; what is still queued is not scored."""
        atexit.unregister(self.close)
        self._closing.set()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        for future in self._pending:
            future.cancel()

    def _start(self) -> tuple[WorkerProcess, dict[str, Any]]:
        """A worker and its reply to the load request."""
        try:
            worker = WorkerProcess("ullage.rewards.worker", self._closing)
        except OSError as error:  # out of processes, memory or file descriptors
            raise WorkerLost(f"a worker process cannot be started: {error}") from error
        try:
            worker.send(self._loading, LOAD_SECONDS)
            return worker, worker.receive(LOAD_SECONDS)
        except BaseException:
            worker.stop()
            raise

    def _start_first(self) -> tuple[WorkerProcess, list[dict[str, str]]]:
        try:
            worker, reply = self._start()
        except WorkerLost as lost:
            raise ConfigError(
                f"the reward functions cannot be loaded: {lost}", "import them in a Python shell to see what happens"
            ) from None
        if problems := reply.get("problems"):
            worker.stop()
            raise ConfigError(
                "\n".join(cause for cause, _ in problems), "\n".join(dict.fromkeys(remedy for _, remedy in problems))
            )
        return worker, reply["rewards"]

    def _serve(self, worker: WorkerProcess | None) -> None:
        """A thread: owns one worker at a time, replaces it when it is lost."""
        if worker is None:
            with contextlib.suppress(WorkerLost):  # started while the run still loads its model; else at the first job
                worker = self._replacement()
        try:
            while (job := self._jobs.get()) is not None and not self._closing.is_set():
                line, asked, future = job
                try:
                    if worker is None or worker.ended():
                        worker = self._replacement(worker)
                    score = self._score(worker, line, asked)
                except WorkerLost as lost:
                    score = Score(None, {}, str(lost))
                    if worker is not None:
                        worker.stop()
                    worker = None
                except Exception as error:  # noqa: BLE001 -- a bug of ours: raised where the result is waited for
                    future.set_exception(error)
                    continue
                future.set_result(score)
        finally:
            if worker is not None:
                worker.stop()

    def _replacement(self, lost: WorkerProcess | None = None) -> WorkerProcess:
        """A worker that has loaded the functions; ours ended, or there was none."""
        if lost is not None:
            lost.stop()
        worker, reply = self._start()
        if problems := reply.get("problems"):
            worker.stop()
            raise WorkerLost(f"the reward functions no longer load: {problems[0][0]}")
        return worker

    def _score(self, worker: WorkerProcess, line: bytes, asked: list[int]) -> Score:
        """The replies of the functions that are asked, summed up."""
        parts: dict[str, float] = {}
        total = 0.0
        answer: str | None = None
        for index in asked:
            label = self.labels[index]
            try:
                if index == asked[0]:
                    worker.send(line, self._timeout_seconds)
                reply = worker.receive(self._timeout_seconds)
            except WorkerLost as lost:
                raise WorkerLost(f"{lost} in {self._where[index]}") from None
            if "error" in reply:
                return Score(None, parts, reply["error"])
            if reply["score"] is None:
                continue
            parts[label] = reply["score"]
            parts |= {f"{label}/{name}": value for name, value in reply["metrics"].items()}
            total += self._functions[index].weight * reply["score"]
            answer = reply["answer"] if answer is None else answer
        if not parts:
            return Score(None, parts, f"{', '.join(self._where[index] for index in asked)} returned None")
        if not math.isfinite(total):
            return Score(None, parts, f"the weighted sum is {total}")
        return Score(total, parts, None, answer)


def scores_source(function: RewardFunction, source: str) -> bool:
    """Whether a reward function is for the rows of this source."""
    return not function.sources or source in function.sources


def check_budget(scores: list[Score], max_failure_fraction: float) -> None:
    """ServiceError if a larger share of the scores failed."""
    failed = [score for score in scores if score.total is None]
    if len(failed) > max_failure_fraction * len(scores):
        limit = f"{100 * max_failure_fraction:g} %"
        raise ServiceError(
            f"{len(failed)} of {len(scores)} rewards failed (limit {limit}): first: {failed[0].error}",
            f"{failed[0].remedy}, or raise reward.max_failure_fraction",
        )


def _specification(function: RewardFunction) -> dict[str, Any]:
    return {"path": function.path, "name": function.name, "kwargs": function.kwargs}


def terms(function: RewardFunction) -> str:
    """What the config says about a function, where it says anything."""
    weight = f", weight {function.weight:g}" if function.weight != 1 else ""
    return weight + (f", for {' and '.join(function.sources)}" if function.sources else "")


def distinct(labels: list[str]) -> list[str]:
    """`["score", "score"]` -> `["score", "score_2"]`."""
    found: list[str] = []
    for label in labels:
        name, number = label, 1
        while name in found:
            number += 1
            name = f"{label}_{number}"
        found.append(name)
    return found


def as_json(value: Any) -> Any:  # noqa: ANN401
    """Values of a data set that JSON does not know: numpy's, and dates."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")
