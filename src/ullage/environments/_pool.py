"""The run's side of environments: episodes spread over worker processes that may be lost without harm to the run."""

import atexit
import contextlib
import json
import queue
import threading
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from ullage.base.errors import ConfigError
from ullage.base.process import WorkerLost, WorkerProcess, num_workers
from ullage.config.tree import Config
from ullage.environments import Row, Turn

LOAD_SECONDS = 120.0
"""Limit for importing and building the environment."""
GRACE_SECONDS = 5.0
"""The worker keeps the limit of a call itself; it is lost only when it does not."""

Reply = dict[str, Any]
Job = tuple[bytes, float, Future[Reply]]


class EnvironmentPool:
    """Workers for the environment of a config; made only if it can be built."""

    def __init__(self, config: Config) -> None:
        environment = config.environment
        assert environment.name is not None, "a run without an environment has no pool"
        self.name = environment.name
        self._seconds = config.reward.timeout_seconds
        self._loading = json.dumps({"name": environment.name, "kwargs": environment.kwargs}).encode()
        self._closing = threading.Event()
        self._pending: list[tuple[int, Future[Reply]]] = []
        self._num_episodes = 0
        try:
            first, reply = self._start()
        except WorkerLost as lost:
            raise ConfigError(
                f"the environment {self.name} cannot be loaded: {lost}",
                "import it in a Python shell to see what happens",
            ) from None
        if problem := reply.get("problem"):
            first.stop()
            raise ConfigError(*problem)
        self.tool_schemas: list[dict[str, Any]] = reply["tool_schemas"]
        """Tools that the environment offers, as chat templates take them."""
        starts = [first, *[None] * (num_workers(config.reward.num_workers) - 1)]
        self.max_episodes: int = reply["max_episodes"] * len(starts)
        """As many may be open at once; numbered in turn, the workers have equal shares of them."""
        self._jobs: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in starts]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker, jobs), daemon=True, name="environment")
            for worker, jobs in zip(starts, self._jobs, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    def reset(self, row: Row) -> int:
        """Begin an episode; returns its number at once."""
        self._num_episodes += 1
        self._submit(self._num_episodes, {"row": asdict(replace(row, seconds=self._seconds))})
        return self._num_episodes

    def step(self, episode: int, action: str) -> None:
        """Hand over the model's answer; returns at once."""
        self._submit(episode, {"action": action})

    def end(self, episode: int) -> None:
        """The run ends an episode that the environment did not."""
        self._submit(episode, {"end": True})

    def collect(self) -> list[tuple[int, Turn | None, str | None]]:
        """(episode, turn, error) of everything submitted since the last call, in that order; waits for them.

        What is not a step has neither a turn nor, if all is well, an error.
        """
        pending, self._pending = self._pending, []
        results: list[tuple[int, Turn | None, str | None]] = []
        for episode, future in pending:
            reply = future.result()
            error = reply.get("error")
            results.append((episode, Turn(**reply) if reply and error is None else None, error))
        return results

    def close(self) -> None:
        """Kill every worker and every episode."""
        atexit.unregister(self.close)
        self._closing.set()
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        for _, future in self._pending:
            future.cancel()

    def _submit(self, episode: int, request: dict[str, Any]) -> None:
        assert not self._closing.is_set(), "used after close()"
        future: Future[Reply] = Future()
        self._pending.append((episode, future))
        line = json.dumps({"episode": episode, "seconds": self._seconds, **request}).encode()
        self._jobs[episode % len(self._jobs)].put((line, self._seconds + GRACE_SECONDS, future))

    def _start(self) -> tuple[WorkerProcess, Reply]:
        try:
            worker = WorkerProcess("ullage.environments._worker", self._closing)
        except OSError as error:  # out of processes, memory or file descriptors
            raise WorkerLost(f"a worker process cannot be started: {error}") from error
        try:
            worker.send(self._loading, LOAD_SECONDS)
            return worker, worker.receive(LOAD_SECONDS)
        except BaseException:
            worker.stop()
            raise

    def _replacement(self) -> WorkerProcess:
        worker, reply = self._start()
        if problem := reply.get("problem"):
            worker.stop()
            raise WorkerLost(f"the environment can no longer be built: {problem[0]}")
        return worker

    def _serve(self, worker: WorkerProcess | None, jobs: "queue.SimpleQueue[Job | None]") -> None:
        """A thread: owns one worker at a time, replaces it when it is lost. Its episodes are lost with it."""
        if worker is None:
            with contextlib.suppress(WorkerLost):  # started while the run still loads its model; else at the first job
                worker = self._replacement()
        try:
            while (job := jobs.get()) is not None and not self._closing.is_set():
                line, seconds, future = job
                try:
                    worker = worker or self._replacement()
                    worker.send(line, seconds)
                    reply = worker.receive(seconds)
                except WorkerLost as lost:
                    reply = {"error": str(lost)}
                    if worker is not None:
                        worker.stop()
                    worker = None
                except Exception as error:  # noqa: BLE001 -- a bug of ours: raised where the result is waited for
                    future.set_exception(error)
                    continue
                future.set_result(reply)
        finally:
            if worker is not None:
                worker.stop()
