"""Sends metrics to other loggers, each in its own process: one that fails, hangs or dies never touches the training.

A process and not a thread, because such libraries also hook exit, signals and output, and would hang there instead.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import ullage
from ullage.base.errors import ConfigError
from ullage.telemetry.run_directory import RunDirectory, RunInfo
from ullage.telemetry.writer import json_text

SINKS = ("tensorboard", "wandb")
_MAX_WAITING_LINES = 10_000


def make_sinks(
    loggers: Sequence[str], directory: RunDirectory, project: str, warn: Callable[[str], None]
) -> list["ProcessSink"]:
    """The sinks that `trainer.logger` names; one whose package is not installed is refused before the run starts."""
    names = [name for name in dict.fromkeys(loggers) if name in SINKS]
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"trainer.logger asks for {name}, which is not installed",
                f"pip install 'ullage[{name}]', or take {name} out of trainer.logger",
            )
    return [ProcessSink(name, directory, project, warn) for name in names]


class ProcessSink:
    """A view that writes lines to a logger's process without ever waiting for it, except a little at the end."""

    def __init__(
        self,
        name: str,
        directory: RunDirectory,
        project: str,
        warn: Callable[[str], None],
        command: Sequence[str] | None = None,
        close_seconds: float = 10.0,
    ) -> None:
        self._name = name
        self._warn = warn
        self._project = project
        self._folder = directory.logs / name
        self._log = directory.logs / f"{name}.log"
        self._command = command or (sys.executable, "-P", "-m", "ullage.telemetry.sink_process", name)
        self._close_seconds = close_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: deque[bytes] = deque()

    def start(self, info: RunInfo) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = _start(self._command, log)
        except OSError as error:
            self._give_up(str(error))
        self._send({"info": asdict(info), "folder": str(self._folder.resolve()), "project": self._project})

    def phase(self, name: str, done: int, total: int, note: str) -> None:
        """Not sent: loggers keep results."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._send({"step": step, "metrics": dict(metrics)})

    def event(self, text: str) -> None:
        """Not sent: the text may come from data or a model."""

    def stop(self) -> None:
        """Let it finish for a few seconds, then end it."""
        process, deadline = self._process, time.monotonic() + self._close_seconds
        while self._process is not None and self._waiting and time.monotonic() < deadline:
            time.sleep(0.02)
            self._flush()
        if process is None or self._process is None:
            return
        assert process.stdin is not None, "started with a pipe"
        with suppress(OSError):
            process.stdin.close()
        try:
            code = process.wait(timeout=max(0.1, deadline - time.monotonic()))
            if code != 0:
                self._give_up(self._last_words())
        except subprocess.TimeoutExpired:
            self._give_up(f"did not finish in {self._close_seconds:.0f} s; what it has is in {self._folder}")

    def _send(self, message: Mapping[str, object]) -> None:
        if self._process is not None:
            self._waiting.append(json_text(message).encode() + b"\n")
            self._flush()

    def _flush(self) -> None:
        """Write what the pipe takes now."""
        if self._process is None or self._process.stdin is None:
            return
        try:
            while self._waiting:
                line = self._waiting.popleft()
                written = os.write(self._process.stdin.fileno(), line)
                if written < len(line):
                    self._waiting.appendleft(line[written:])
                    return
        except BlockingIOError:
            self._waiting.appendleft(line)
            if len(self._waiting) > _MAX_WAITING_LINES:
                self._give_up("takes no more lines")
        except OSError:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.5)  # the pipe broke: it is ending, and its log is then complete
            self._give_up(self._last_words())

    def _give_up(self, reason: str) -> None:
        process, self._process = self._process, None
        self._waiting.clear()
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes it started; see start_new_session
            process.wait()
        self._warn(f"warning: logger {self._name} is off, training goes on: {reason}")

    def _last_words(self) -> str:
        with suppress(OSError, IndexError):
            return self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
        return f"its process ended; see {self._log}"


def _start(command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    package_root = str(Path(ullage.__file__).parent.parent)
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # Ctrl-C is for the training, which then ends this process in order
    )
    assert process.stdin is not None, "started with a pipe"
    os.set_blocking(process.stdin.fileno(), False)
    return process
