"""`ullage resume`: continue a run from its newest whole checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ullage.config.tree import Config
    from ullage.run.change import Change
    from ullage.telemetry.run_directory import RunDirectory

HELP = "continue a run that was stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the run's folder, or its name below runs/")
    parser.add_argument("--step", type=int, metavar="N", help="go back to the checkpoint of this step")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from ullage.config.check import require_runnable
    from ullage.config.load import load_config
    from ullage.run.change import changes, refuse_bound
    from ullage.run.locate import open_run

    directory = open_run(arguments.run)
    before = load_config(directory.resolved).config
    loaded = load_config(directory.resolved, overrides)
    for notice in loaded.notices:
        _say(f"config: {notice}")
    require_runnable(loaded.config)
    changed = changes(before, loaded.config)
    refuse_bound(changed)
    if arguments.step is None and (step := finished_at(directory, loaded.config, changed)) is not None:
        _say(f"nothing to do: {directory.path} is finished, step {step} of {step}")
        _say(f"  to train on: ullage resume {directory.path} trainer.total_training_steps={2 * step}")
        code = 0
    else:
        code = _continue(directory, loaded.config, changed, arguments.step)
    if arguments.json:
        print(json.dumps({"run": str(directory.path), "code": code}))
    return code


def finished_at(directory: RunDirectory, config: Config, changed: list[Change]) -> int | None:
    """The last step of a run that has nothing left to do; None where it goes on, or that is not certain yet."""
    from ullage.telemetry.reader import read_run

    summary = read_run(directory.path)
    total = config.trainer.total_training_steps
    if total is None and not {change.path for change in changed} & {
        "trainer.total_training_steps",
        "trainer.total_epochs",
        "data.train_batch_size",
    }:
        total = summary.total_steps
    is_finished = summary.state == "finished" and directory.final.is_dir()
    return summary.step if is_finished and total is not None and summary.step >= total else None


def _continue(directory: RunDirectory, config: Config, changed: list[Change], step: int | None) -> int:
    from ullage.config.load import resolved_yaml
    from ullage.run.launch import launch
    from ullage.run.locate import weights_of_step
    from ullage.telemetry.run_directory import write_atomically
    from ullage.telemetry.writer import MetricsWriter

    if step is not None:
        weights_of_step(directory, step)  # before anything is touched: it must be there, and whole
    directory.reopen()
    try:
        if step is not None:
            from ullage.engine.checkpoint import continue_from

            continue_from(directory.checkpoint_of(step))
        if changed:
            write_atomically(directory.resolved, resolved_yaml(config))
            writer = MetricsWriter(directory)
            for change in changed:
                _say(f"config: {change}")
                writer.event(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} resumed with {change}")
            writer.close()
        if not any(directory.checkpoints.glob("step_*")):
            _say(f"{directory.path} has no checkpoint yet: starting from the beginning")
        code = launch(directory)
    finally:
        directory.close()
    if code == 0:
        _say(f"trained model: {directory.final}")
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr)
