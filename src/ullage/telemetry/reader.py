"""Reads run folders as they are: running, finished, killed half-way. Knows only the files, never the trainer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ullage.telemetry.lock import read_owner
from ullage.telemetry.metrics import best_evaluation

State = Literal["running", "finished", "failed", "interrupted"]
_STOPPED_ON_REQUEST = {75, 130}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One line of `ullage ls`."""

    name: str
    path: str
    state: State
    step: int
    total_steps: int | None
    reward: float | None
    best_evaluation: float | None
    best_evaluation_step: int | None
    model: str | None
    algorithm: str | None
    created_at: float | None
    """Seconds since 1970."""
    updated_at: float
    reason: str | None
    resume_command: str | None


def read_run(path: Path) -> RunSummary:
    """What there is to know about the run in `path`; a file that is missing or damaged leaves its fields empty."""
    path = Path(path)
    info, outcome, rows = _read_object(path / "run.json"), _read_object(path / "exit.json"), read_metrics(path)
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    best, best_step = best_evaluation((row["step"], row) for row in rows) or (None, None)
    return RunSummary(
        name=str(info.get("name") or path.name),
        path=str(path),
        state=_state(path, outcome),
        step=rows[-1]["step"] if rows else 0,
        total_steps=_as_int(info.get("total_steps")),
        reward=rewards[-1] if rewards else None,
        best_evaluation=best,
        best_evaluation_step=best_step,
        model=_as_text(info.get("model")),
        algorithm=_as_text(info.get("algorithm")),
        created_at=_as_number(info.get("created_at")),
        updated_at=_updated_at(path),
        reason=_as_text(outcome.get("reason")),
        resume_command=_as_text(outcome.get("resume_command")),
    )


def read_runs(root: Path) -> list[RunSummary]:
    """Every run below `root`, the one written last first."""
    folders = [path for path in Path(root).iterdir() if is_run(path)]
    return sorted((read_run(path) for path in folders), key=lambda run: run.updated_at, reverse=True)


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("run.json", "resolved.yaml", "metrics.jsonl"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One dict per step, in order; lines of one step are merged, the later value of a key wins."""
    steps: dict[int, dict[str, Any]] = {}
    for row in read_lines(Path(path) / "metrics.jsonl"):
        if isinstance(row.get("step"), int):
            steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines; a half-written or damaged line is passed over."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    return [value for line in lines if line and (value := _parse_object(line)) is not None]


def _state(path: Path, outcome: Mapping[str, Any]) -> State:
    owner = read_owner(path / "lock")
    if owner is not None and owner.is_alive():
        return "running"
    code = outcome.get("code")
    if code == 0:
        return "finished"
    return "interrupted" if code is None or code in _STOPPED_ON_REQUEST else "failed"


def _updated_at(path: Path) -> float:
    times = []
    for name in ("metrics.jsonl", "exit.json", "run.json", ""):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return _parse_object(path.read_bytes()) or {}
    except OSError:
        return {}


def _parse_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:  # includes bytes that are not UTF-8
        return None
    return value if isinstance(value, dict) else None


def _as_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _as_int(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _as_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
