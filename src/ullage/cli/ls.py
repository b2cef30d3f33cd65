"""`ullage ls`: the runs of a folder and how far they are."""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

from ullage.base.errors import UsageError
from ullage.telemetry.reader import RunSummary, read_runs
from ullage.telemetry.view import encodable, printable
from ullage.telemetry.writer import json_text

HELP = "list runs"
_DEFAULT_ROOT = "runs"
_COLUMNS = ("name", "state", "step", "reward", "best eval", "algorithm", "model", "age")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", default=None, help=f"folder that holds the runs (default: {_DEFAULT_ROOT})")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    del overrides
    root = Path(arguments.root or _DEFAULT_ROOT)
    if arguments.root and not root.is_dir():
        raise UsageError(f"--root {root}: no such folder", "give the folder that holds the runs")
    runs = read_runs(root) if root.is_dir() else []
    if arguments.json:
        print(json_text([asdict(summary) for summary in runs], indent=2))
    elif runs:
        print(encodable(printable(table(runs, time.time())), sys.stdout))
    else:
        print(f"no runs in {root}/ yet; start one with `ullage demo` or `ullage train`", file=sys.stderr)
    return 0


def table(runs: list[RunSummary], now: float) -> str:
    """Aligned columns, one run per line."""
    rows = [_COLUMNS, *(_row(summary, now) for summary in runs)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _row(summary: RunSummary, now: float) -> tuple[str, ...]:
    total = f"/{summary.total_steps}" if summary.total_steps is not None else ""
    best, at = summary.best_evaluation, summary.best_evaluation_step
    best_text = f"{best:.3f} at {at}" if best is not None else "-"
    reward = f"{summary.reward:.3f}" if summary.reward is not None else "-"
    model = (summary.model or "-").rstrip("/").rsplit("/", 1)[-1]
    result = (f"{summary.step}{total}", reward, best_text)
    return (summary.name, summary.state, *result, summary.algorithm or "-", model, age_text(now - summary.updated_at))


def age_text(seconds: float) -> str:
    """`90` -> `1 min`: the largest whole unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return "now"
