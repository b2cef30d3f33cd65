"""`ullage eval`: mean@n, pass@k, best@k and maj@k of a run or a model on held-out data."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ullage.base.errors import WriteError

if TYPE_CHECKING:
    from ullage.config.tree import Config
    from ullage.run.locate import Located
    from ullage.telemetry.run_directory import RunInfo
    from ullage.trainer.evaluate import Evaluation

HELP = "score a run or a model on held-out data"
_VAL = "actor_rollout_ref.rollout.val_kwargs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run, a checkpoint, a model folder, a GGUF file or a Hub id")
    parser.add_argument("config", nargs="?", type=Path, help="YAML file with data and reward; default: the run's own")
    parser.add_argument("--data", metavar="FILE", help="held-out prompts: a file, a Hub id, reasoning_gym:<task>")
    parser.add_argument("--reward", metavar="NAME", help="a built-in reward, FILE.py or FILE.py:function")
    parser.add_argument("--n", type=int, metavar="N", help="samples per prompt")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write every sample as a line of JSON")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.samples is not None:  # before the minutes that the evaluation takes
        _check_new(arguments.samples)
    from ullage.run.locate import locate

    found = locate(arguments.model)
    for warning in found.warnings:
        print(warning, file=sys.stderr)
    config = evaluation_config(arguments, found, overrides)

    from ullage.run.score import evaluate_weights, require_evaluable
    from ullage.telemetry.run_directory import write_atomically
    from ullage.telemetry.view import encodable, printable
    from ullage.telemetry.writer import json_text

    require_evaluable(config)
    step = "" if found.step is None else f", step {found.step}"
    print(f"evaluating {found.weights}{step}", file=sys.stderr)
    result = evaluate_weights(config, found.weights, ProgressLine(sys.stderr))
    if arguments.samples is not None:
        write_atomically(arguments.samples, "".join(json_text(row) + "\n" for row in result.rows))
    failed = sum(row["reward_error"] is not None for row in result.rows)
    if failed:
        print(f"{failed} of {len(result.rows)} samples could not be scored and count as 0", file=sys.stderr)
    if arguments.json:
        sampling = config.actor_rollout_ref.rollout.val_kwargs
        summary = {
            "weights": found.weights,
            "step": found.step,
            "score": result.score,
            "metrics": result.metrics,
            "num_prompts": len({row["prompt_id"] for row in result.rows}),
            "num_failed": failed,
            "n": sampling.n,
            "temperature": sampling.temperature,
        }
        print(json.dumps(summary))
    else:
        print(encodable(printable(table(result)), sys.stdout))
    return 0


def evaluation_config(arguments: argparse.Namespace, found: Located, overrides: list[str]) -> Config:
    """The config of the file, or of the run, with what the command line says on top."""
    from ullage.config.load import load_config

    path: Path | None = arguments.config
    if path is None and found.run is not None:
        path = found.run.resolved
    flags = {
        "data.val_files": None if arguments.data is None else [arguments.data],
        "reward.functions": arguments.reward,
        f"{_VAL}.n": arguments.n,
        f"{_VAL}.temperature": arguments.temperature,
    }
    # JSON is YAML; ASCII escapes are not, beyond the basic plane.
    given = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in flags.items() if value is not None]
    loaded = load_config(path, [*overrides, *given])
    for notice in loaded.notices:
        print(f"config: {notice}", file=sys.stderr)
    return loaded.config


def table(result: Evaluation) -> str:
    """One column per source; one line for the number of prompts and for every score."""
    prompts: dict[str, set[int]] = {}
    for row in result.rows:
        prompts.setdefault(row["source"], set()).add(row["prompt_id"])
    scores = {source: _scores_of(source, result.metrics) for source in prompts}
    names = dict.fromkeys(name for values in scores.values() for name in values)
    columns = [["source", "prompts", *names]]
    for source, members in prompts.items():
        values = [f"{scores[source][name]:.4f}" if name in scores[source] else "-" for name in names]
        columns.append([source, str(len(members)), *values])
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in zip(*columns, strict=True)
    )


def _scores_of(source: str, metrics: Mapping[str, float]) -> dict[str, float]:
    prefix = f"eval/{source}/"
    return {
        name.removeprefix(prefix): value for name, value in metrics.items() if name.rpartition("/")[0] + "/" == prefix
    }


class ProgressLine:
    """A view of an evaluation: one line that is rewritten on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        from ullage.telemetry.view import is_interactive

        self._stream = stream
        self._interactive = is_interactive(stream, os.environ)
        self._seconds = 0.2 if self._interactive else 10.0
        self._last = time.monotonic()
        self._is_open = False

    def start(self, info: RunInfo) -> None:
        del info

    def phase(self, name: str, done: int, total: int, note: str) -> None:
        if not total or time.monotonic() - self._last < self._seconds:
            return
        self._last = time.monotonic()
        text = f"{name}: {done} of {total} samples, {note}"
        self._stream.write(f"\r{text}\x1b[K" if self._interactive else f"{text}\n")
        self._stream.flush()
        self._is_open = self._interactive

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        del step, metrics

    def event(self, text: str) -> None:
        from ullage.telemetry.view import encodable, printable

        self._close_line()
        self._stream.write(encodable(printable(text), self._stream) + "\n")

    def stop(self) -> None:
        self._close_line()
        self._stream.flush()

    def _close_line(self) -> None:
        if self._is_open:
            self._stream.write("\r\x1b[K")
            self._is_open = False


def _check_new(path: Path) -> None:
    if os.path.lexists(path):
        raise WriteError(f"{path} already exists", "give another name, or remove it first")
    if not path.parent.is_dir():
        raise WriteError(f"{path.parent} is not a folder", "make it first, or give another path")
