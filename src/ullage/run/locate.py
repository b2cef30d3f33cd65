"""What a user means by MODEL_OR_RUN: the weights it names and, where they are a run's, that run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from ullage.base.errors import ModelError, UsageError, WriteError
from ullage.config.load import load_config
from ullage.config.tree import Config
from ullage.run.launch import newest_checkpoint
from ullage.telemetry.reader import is_run, read_run
from ullage.telemetry.run_directory import RunDirectory

RUNS = Path("runs")
"""Where runs live unless a config says otherwise; a bare name is looked for here."""
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Weights, and where they come from."""

    weights: str
    """What `load_model` takes: a folder, a GGUF file or a Hub id."""
    run: RunDirectory | None = None
    step: int | None = None
    """The training step of a run's weights."""
    warnings: tuple[str, ...] = ()
    """What was wrong with newer weights that were passed over."""

    @property
    def config(self) -> Config | None:
        """The config the weights were trained with, where they are a run's."""
        return load_config(self.run.resolved).config if self.run and self.run.resolved.is_file() else None


def locate(given: str) -> Located:
    """The weights of a run (by folder or name), a checkpoint, a model folder, a GGUF file or a Hub id."""
    path = Path(given).expanduser()
    folder = run_folder(given)
    if folder is not None:
        return newest_weights(RunDirectory.open_existing(folder))
    if (path / "manifest.json").is_file():
        return _checkpoint(path.resolve())
    if path.name == "final" and is_run(path.resolve().parent):
        run = RunDirectory.open_existing(path.resolve().parent)
        return Located(weights=str(path), run=run, step=read_run(run.path).step)
    if not path.exists() and path.parent.is_dir() and any(is_run(neighbour) for neighbour in path.parent.iterdir()):
        raise UsageError(f"no run {given}", "`ullage ls` lists the runs; give the name or the path of one of them")
    return Located(weights=given)


def run_folder(given: str) -> Path | None:
    """The folder of a run given by its path or by its name."""
    path = Path(given).expanduser()
    if not path.exists() and path.name == given:
        path = RUNS / given
    return path if is_run(path) else None


def open_run(given: str) -> RunDirectory:
    """The run of that path or name; UsageError where there is none."""
    folder = run_folder(given)
    if folder is None:
        raise UsageError(f"no run {given}", "`ullage ls` lists the runs; give the name or the path of one of them")
    return RunDirectory.open_existing(folder)


def newest_weights(run: RunDirectory) -> Located:
    """`final/` of a finished run; otherwise, since an older `final/` may be there, the newest whole checkpoint."""
    summary = read_run(run.path)
    if summary.state == "finished" and run.final.is_dir():
        return Located(weights=str(run.final), run=run, step=summary.step)
    folder, warnings = newest_checkpoint(run)
    if folder is None:
        raise ModelError(
            f"the run {run.path} has no weights yet",
            "wait for its first checkpoint (trainer.save_freq), or give the model it started from",
        )
    return Located(weights=str(folder / "model"), run=run, step=_step_of(folder), warnings=tuple(warnings))


def weights_of_step(run: RunDirectory, step: int) -> Located:
    """The checkpoint of one step, with no other in its place."""
    folder = run.checkpoint_of(step)
    if not folder.is_dir():
        steps = sorted(_step_of(path) for path in run.checkpoints.glob("step_*") if _STEP.fullmatch(path.name))
        have = f"there are: {', '.join(map(str, steps))}" if steps else "there is none yet"
        raise ModelError(f"the run {run.path} has no checkpoint of step {step}", have)
    return _checkpoint(folder)


def best_weights(run: RunDirectory) -> Located:
    """The checkpoint of the best evaluation."""
    from ullage.engine.checkpoint import STATE

    folder, _ = newest_checkpoint(run)
    best = json.loads((folder / STATE).read_text(encoding="utf-8"))["best"] if folder is not None else None
    if best is None:
        raise ModelError(f"the run {run.path} has no evaluation yet", "give data.val_files, or choose with --step")
    step, score = best
    if not run.checkpoint_of(step).is_dir():
        raise ModelError(
            f"the best evaluation of {run.path} ({score:.4g}) was at step {step}, which was not saved",
            "choose another with --step; next time give trainer.save_freq and trainer.test_freq the same value",
        )
    return weights_of_step(run, step)


def _checkpoint(folder: Path) -> Located:
    from ullage.engine.checkpoint import verify

    problems = verify(folder)
    if problems:
        raise WriteError(f"damaged checkpoint: {problems[0]}", "choose another checkpoint of this run")
    owner = folder.parent.parent
    run = RunDirectory.open_existing(owner) if is_run(owner) else None
    return Located(weights=str(folder / "model"), run=run, step=_step_of(folder))


def _step_of(folder: Path) -> int:
    match = _STEP.match(folder.name)
    if match is None:
        raise UsageError(f"{folder} is not named step_N", "give a checkpoint folder as the run wrote it")
    return int(match[1])
