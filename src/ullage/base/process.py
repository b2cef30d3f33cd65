"""The run's side of one worker process: starting it, asking it, and getting rid of it."""

import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

import ullage
from ullage.base.guard import STOP

SLICE_SECONDS = 0.2
"""How often a wait looks whether the pool closes or the process has ended without closing its pipe."""
STOP_SECONDS = 5.0
MAX_REPLY_BYTES = 1 << 20
MAX_AUTO_WORKERS = 4


class WorkerLost(Exception):  # noqa: N818 -- names what happened to the worker; it becomes the sample's error text
    """The worker can no longer be used; the text says why."""


class WorkerProcess:
    """A worker, from start to stop: `python -m module`, JSON lines in and out.

    Used by one thread at a time; `closing` makes its waits end early.
    """

    def __init__(self, module: str, closing: threading.Event) -> None:
        self._closing = closing
        self._received = b""
        # Holds what the interpreter itself says when it cannot start; the worker leaves it before loading user code.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 -- closed in stop()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=_environment(),
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)

    def send(self, line: bytes, seconds: float) -> None:
        """Send one line of JSON."""
        deadline = time.monotonic() + seconds
        unsent = memoryview(line + b"\n")
        while unsent:
            self._wait(self._input.fileno(), select.POLLOUT, deadline, seconds)
            try:
                unsent = unsent[os.write(self._input.fileno(), unsent) :]
            except BrokenPipeError:
                raise WorkerLost(self._ending()) from None

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next reply."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            self._wait(self._output.fileno(), select.POLLIN, deadline, seconds)
            chunk = os.read(self._output.fileno(), 1 << 16)
            if not chunk:
                raise WorkerLost(self._ending())
            self._received += chunk
            if len(self._received) > MAX_REPLY_BYTES:
                raise WorkerLost(f"returned more than {MAX_REPLY_BYTES} bytes")
        line, _, self._received = self._received.partition(b"\n")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError:
            raise WorkerLost("wrote into the worker's own pipe") from None
        return reply

    def ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Kill the worker and everything it started; may be called again."""
        self._input.close()
        self._process.send_signal(STOP)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()
        self._complaints.close()

    def _wait(self, descriptor: int, event: int, deadline: float, seconds: float) -> None:
        poller = select.poll()
        poller.register(descriptor, event)
        while True:
            remaining = deadline - time.monotonic()
            if poller.poll(1000 * min(max(remaining, 0.0), SLICE_SECONDS)):
                return
            if self._closing.is_set():
                raise WorkerLost("stopped: the pool was closed")
            if self.ended():  # a process that it left behind may hold the pipe open
                raise WorkerLost(self._ending())
            if remaining <= 0:
                raise WorkerLost(f"timeout after {seconds:g} s")

    def _ending(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed the worker's own pipe"
        if code < 0:
            return f"killed by signal {-code} ({signal.strsignal(-code)})"
        self._complaints.seek(0)
        lines = self._complaints.read(1 << 16).decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"exited with code {code}" + (f": {last}" if last else "")


def num_workers(wanted: int | Literal["auto"]) -> int:
    """How many workers a pool has; auto: one per core of ours, up to a few."""
    if wanted != "auto":
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_AUTO_WORKERS, cores)


def _environment() -> dict[str, str]:
    """The run's own, one thread per worker, set order fixed so that a resumed run does as the first one did."""
    environment = {"PYTHONHASHSEED": "0", **os.environ, "OMP_NUM_THREADS": "1"}
    root = str(Path(ullage.__file__).resolve().parents[1])
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):  # not installed, or in editable form
        paths = [path for path in (root, environment.get("PYTHONPATH")) if path]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
