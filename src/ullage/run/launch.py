"""Starting a run: in this process, or as several local ranks that this process watches over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.base import errors
from ullage.base.errors import PeerLostError, UllageError, WriteError
from ullage.config.load import load_config
from ullage.telemetry.reader import read_run
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.stop import SIGNALS, Stop

GRACE_SECONDS = 15.0
"""How long ranks may take to end by themselves once one of them has failed."""
LOOK_SECONDS = 0.05


def launch(directory: RunDirectory) -> int:
    """Run what the directory's resolved.yaml says, from its newest checkpoint if it has one. Returns the exit code.

    Failures are raised, and exit.json says how the run ended.
    """
    with Stop().installed() as stop:
        count = load_config(directory.resolved).config.trainer.n_gpus_per_node
        if count == 1:
            from ullage.run.rank import run_rank

            return run_rank(directory, stop)
        try:
            conclude(directory, watch(start_ranks(directory, count), stop))
        except UllageError as error:
            _correct_outcome(directory, error)
            raise
    return 0


def discard_if_untrained(directory: RunDirectory) -> None:
    """Remove a run that failed before it wrote anything worth keeping, so that its name is free again."""
    if not directory.metrics.exists() and not any(directory.checkpoints.glob("step_*")):
        shutil.rmtree(directory.path, ignore_errors=True)


def newest_checkpoint(directory: RunDirectory) -> tuple[Path | None, list[str]]:
    """Where to continue from, and what was wrong with the checkpoints passed over; None: from the beginning."""
    from ullage.engine.checkpoint import checkpoints, latest_verified

    found = latest_verified(directory.checkpoints)
    if found is not None:
        return found
    if checkpoints(directory.checkpoints):
        raise WriteError(
            f"every checkpoint in {directory.checkpoints} is damaged",
            "restore one from a copy, or delete them all to train again from the beginning",
        )
    return None, []


# --- several ranks ---


@dataclass(slots=True)
class Rank:
    """One process of the run. Its stdin ends with this process, and with it the rank; its stdout is its last word."""

    number: int
    process: subprocess.Popen[bytes]

    def last_word(self) -> dict[str, Any] | None:
        """The error it ended with, as `ullage.run.rank.main` tells it; None where it finished or was killed."""
        assert self.process.stdout is not None, "started with a pipe"
        with self.process.stdout as pipe:
            text = pipe.read()
        try:
            told: dict[str, Any] = json.loads(text)
        except ValueError:
            return None
        return told


def start_ranks(directory: RunDirectory, count: int) -> list[Rank]:
    """Start the processes; signals wait until each has its handlers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)), **os.environ, **shared}
    ranks = []
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited by the ranks, who unblock them when they listen
    try:
        for number in range(count):
            # Rank 0 shows the run; what the others say is kept.
            with (directory.logs / f"rank_{number}.log").open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "ullage.run.rank", str(directory.path)],
                    env={**environment, "RANK": str(number), "LOCAL_RANK": str(number)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=None if number == 0 else log,
                    start_new_session=True,  # Ctrl-C comes to this process, which passes it on once
                )
            ranks.append(Rank(number, process))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return ranks


def watch(ranks: list[Rank], stop: Stop) -> list[Rank]:
    """Wait for all, pass a signal on, end the others when one fails. Returns those that failed, the first one first."""
    failed: list[Rank] = []
    running = list(ranks)
    passed_on = False
    deadline = float("inf")
    while running:
        if stop.requested is not None and not passed_on:
            passed_on = True
            for rank in running:
                rank.process.send_signal(stop.requested)
        ended = [rank for rank in running if rank.process.poll() is not None]
        running = [rank for rank in running if rank not in ended]
        failed += [rank for rank in ended if rank.process.returncode != 0]
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for rank in running:
                rank.process.kill()
        time.sleep(LOOK_SECONDS)
    for rank in ranks:
        assert rank.process.stdin is not None, "started with a pipe"
        rank.process.stdin.close()
    return failed


def conclude(directory: RunDirectory, failed: list[Rank]) -> None:
    """Raise what went wrong, once: an error of its own comes before the news that a peer was lost."""
    if not failed:
        return
    told = {rank.number: rank.last_word() for rank in failed}
    lost = PeerLostError.__name__
    for number in sorted(told):
        word = told[number]
        if word is not None and word["kind"] != lost:
            raise getattr(errors, word["kind"], UllageError)(word["cause"], word["remedy"])
    first = next((rank for rank in failed if told[rank.number] is None), failed[0])
    code = first.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code} without a word"
    word = told[first.number]
    raise PeerLostError(
        f"rank {first.number} {how}" if word is None else word["cause"],
        f"see {directory.logs}, and whether memory ran out; continue with: ullage resume {directory.path}",
    )


def _correct_outcome(directory: RunDirectory, error: UllageError) -> None:
    """Where rank 0 died, or knew only that another did, exit.json says what the ranks together know."""
    known: dict[str, Any] = {}
    if directory.exit.exists():
        known = json.loads(directory.exit.read_text(encoding="utf-8"))
    if known.get("reason") != error.cause:
        step = known["step"] if known else read_run(directory.path).step
        command = f"ullage resume {directory.path}"
        MetricsWriter(directory).exit(error.code, error.cause, known.get("phase"), step, command)
