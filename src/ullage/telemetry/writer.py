"""Writes what a run measures: metrics, memory peaks and samples as JSON lines, and how it ended."""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ullage.base.errors import WriteError
from ullage.telemetry.run_directory import RunDirectory, write_atomically


def json_text(value: object, *, indent: int | None = None) -> str:
    """Strict JSON: numbers that are not finite become null."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:  # noqa: ANN401 -- any JSON value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class MetricsWriter:
    """The one writer of a run's measurements. Every line is flushed: a killed run loses at most a part of one."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._files: dict[Path, TextIO] = {}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one step."""
        values = {name: float(value) for name, value in metrics.items()}
        self._append(self.directory.metrics, json_text({"step": step, **values}))

    def memory(
        self,
        step: int,
        phase: str,
        *,
        allocated_peak_bytes: int,
        reserved_peak_bytes: int,
        components: Mapping[str, int],
        planned_bytes: int | None = None,
    ) -> None:
        """Append the measured peak of one phase of one step, beside what was planned for it."""
        row = {
            "step": step,
            "phase": phase,
            "planned_bytes": planned_bytes,
            "allocated_peak_bytes": allocated_peak_bytes,
            "reserved_peak_bytes": reserved_peak_bytes,
            "components": dict(components),
        }
        self._append(self.directory.memory, json_text(row))

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the completions of a step, all or none."""
        text = "".join(json_text(row) + "\n" for row in rows)
        write_atomically(self.directory.samples_of(step), text)

    def evaluation(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the completions of an evaluation, all or none."""
        text = "".join(json_text(row) + "\n" for row in rows)
        write_atomically(self.directory.evaluation_of(step), text)

    def event(self, line: str) -> None:
        """Append one line to the log of events."""
        self._append(self.directory.events, line.replace("\n", " "))

    def exit(self, code: int, reason: str, phase: str | None, step: int, resume_command: str | None) -> None:
        """Say how the run ended. Never raises: its own failure must not hide the reason it was called for."""
        outcome = {"code": code, "reason": reason, "phase": phase, "step": step, "resume_command": resume_command}
        with suppress(WriteError):
            write_atomically(self.directory.exit, json_text(outcome, indent=2) + "\n")

    def truncate_after(self, step: int) -> None:
        """Forget what came after `step`, and a half-written last line: a resumed run writes it again."""
        self.close()
        for path in (self.directory.metrics, self.directory.memory):
            if path.exists():
                lines = path.read_bytes().splitlines(keepends=True)
                kept = [line for line in lines if _is_whole_and_until(line, step)]
                if kept != lines:
                    write_atomically(path, b"".join(kept).decode())
        for path in self.directory.samples.glob("*_*.jsonl"):  # step_N and eval_N
            number = path.stem.rpartition("_")[2]
            if number.isdecimal() and int(number) > step:
                path.unlink()

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # a full disk was already reported by the write
                file.close()
        self._files.clear()

    def _append(self, path: Path, line: str) -> None:
        try:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = path.open("a", encoding="utf-8", errors="replace", newline="\n")
            file.write(line + "\n")
            file.flush()
        except OSError as error:
            raise WriteError(
                f"cannot append to {path}: {error.strerror or error}",
                f"free some disk space, then continue with: ullage resume {self.directory.path}",
            ) from None


class SilentWriter(MetricsWriter):
    """The writer of ranks other than the first: what they measure has been combined, and rank 0 writes it."""

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        del step, rows

    def evaluation(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        del step, rows

    def exit(self, code: int, reason: str, phase: str | None, step: int, resume_command: str | None) -> None:
        del code, reason, phase, step, resume_command

    def truncate_after(self, step: int) -> None:
        del step

    def _append(self, path: Path, line: str) -> None:
        del path, line


def _is_whole_and_until(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict) and isinstance(value.get("step"), int) and value["step"] <= step
