"""Starting a run: in this process, or as several local ranks that this process watches over."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from ullage.base.errors import PeerLostError
from ullage.config.load import load_config
from ullage.telemetry.run_directory import RunDirectory

GRACE_SECONDS = 15.0
"""How long ranks may take to end by themselves once one of them has failed."""


def launch(directory: RunDirectory) -> int:
    """Run what the directory's resolved.yaml says, from its newest checkpoint if it has one. Returns the exit code."""
    config = load_config(directory.resolved).config
    if config.trainer.n_gpus_per_node == 1:
        from ullage.run.rank import run_rank

        return run_rank(directory)
    return _watch(_start(directory, config.trainer.n_gpus_per_node))


def discard_if_untrained(directory: RunDirectory) -> None:
    """Remove a run that failed before it wrote anything worth keeping, so that its name is free again."""
    if not directory.metrics.exists() and not any(directory.checkpoints.glob("step_*")):
        shutil.rmtree(directory.path, ignore_errors=True)


def _start(directory: RunDirectory, count: int) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    ranks = []
    for rank in range(count):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment.setdefault("OMP_NUM_THREADS", threads)
        command = [sys.executable, "-m", "ullage.run.rank", str(directory.path)]
        ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
    return ranks


def _watch(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Pass signals on, wait for all, end all when one fails; the first failure's code is the run's."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: [rank.send_signal(received) for rank in ranks if rank.poll() is None])
    first: tuple[int, int] | None = None
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks):
        for number, rank in enumerate(ranks):
            if first is None and rank.poll() not in (None, 0):
                first, deadline = (number, rank.returncode), time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
        time.sleep(0.05)
    codes = [rank.returncode for rank in ranks]
    told = [code for code in codes if code > 0 and code != PeerLostError.code]
    if told:
        return told[0]
    if first is not None and first[1] < 0:
        name = signal.Signals(-first[1]).name
        raise PeerLostError(f"rank {first[0]} was killed by {name}", "see logs/ of the run; `ullage resume` continues it")
    return max(codes, default=0)


def newest_checkpoint(directory: RunDirectory) -> tuple[Path | None, list[str]]:
    """Where to continue from, and what was wrong with the checkpoints passed over."""
    from ullage.engine.checkpoint import latest_verified

    found = latest_verified(directory.checkpoints)
    return (None, []) if found is None else found
