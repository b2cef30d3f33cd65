"""A run whose objects stay open in this process: the same directory, surroundings, loop and checkpoints as `ullage
train`, with its calls in the hands of user code."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import yaml

from ullage.base.errors import InterruptedRunError, ModelError, PreemptedError, UllageError, WriteError
from ullage.config.load import Loaded, resolved_yaml
from ullage.config.paths import anchored
from ullage.engine import checkpoint
from ullage.run.assemble import assemble
from ullage.run.fit import fitting
from ullage.run.launch import newest_checkpoint
from ullage.run.rank import add_views, surroundings
from ullage.telemetry.run_directory import RunDirectory, RunInfo, write_atomically
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.stop import Stop


def make_directory(loaded: Loaded) -> RunDirectory:
    """A new run directory with its two configs; this process holds its lock until it is closed."""
    trainer = loaded.config.trainer
    directory = RunDirectory(Path(trainer.default_local_dir).expanduser(), trainer.experiment_name)
    directory.create()
    try:
        write_atomically(directory.config, yaml.safe_dump(loaded.given, sort_keys=False))
        write_atomically(directory.resolved, resolved_yaml(anchored(loaded.config, Path.cwd())))
    except UllageError:
        directory.close()
        raise
    return directory


class Session:
    """One rank's objects, from the run's newest checkpoint if it has one; `loop` is what `ullage train` would drive."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._closing = ExitStack()
        self._stop = Stop()
        self._writer = MetricsWriter(directory)
        self._is_shown = False
        with ExitStack() as undo:
            undo.callback(self._closing.close)
            self.given = surroundings(directory, self._stop, self._writer, self._closing, rank=0, size=1)
            folder, warnings = newest_checkpoint(directory)
            for warning in warnings:
                self.given.recorder.event(warning)
            with fitting(self.given):
                self.loop = assemble(self.given, folder)
            self._writer.truncate_after(self.loop.keeper.recorded_until)
            undo.pop_all()

    def train(self) -> None:
        """Train to the last step; exit.json says how it ended, and failures are raised."""
        recorder = self.given.recorder
        code, reason = UllageError.code, "internal error"
        try:
            with self._stop.installed():
                self._show()
                with fitting(self.given):
                    self.loop.train()
            code, reason = 0, "finished"
        except UllageError as error:
            code, reason = error.code, error.cause
            raise
        except Exception as error:
            reason = f"internal error: {type(error).__name__}: {error}"
            raise
        finally:
            recorder.stop()
            stopped = code in (PreemptedError.code, InterruptedRunError.code)
            phase = self._stop.phase if stopped else recorder.current_phase
            command = None if code == 0 else f"ullage resume {self.directory.path}"
            self._writer.exit(code, reason, phase, recorder.current_step, command)
            self._stop.requested = None

    def close(self) -> None:
        """End what the run started; its directory stays locked until that is closed too."""
        self._closing.close()

    def _show(self) -> None:
        """The console and the other loggers of the config, from the first call of `train` on."""
        if not self._is_shown:
            self._is_shown = True
            add_views(self.given.recorder, self.given.config, self.directory)
            self.given.recorder.start(RunInfo(**json.loads(self.directory.info.read_text(encoding="utf-8"))))


# --- checkpoints that come from elsewhere, and go there ---


def verified(path: str | Path) -> Path:
    """The checkpoint folder of that path, if it is one and whole."""
    folder = Path(path).expanduser()
    if not (folder / checkpoint.MANIFEST).is_file():
        raise ModelError(f"no checkpoint in {folder}", "give a folder that save_checkpoint or a run has written")
    problems = checkpoint.verify(folder)
    if problems:
        raise WriteError(f"damaged checkpoint: {problems[0]}", "load another one")
    return folder


def adopt(folder: Path, root: Path) -> None:
    """Make a checkpoint the one that a run's `root` continues from, with a copy of its own where it has none."""
    step = json.loads((folder / checkpoint.STATE).read_text(encoding="utf-8"))["step"]
    own = root / f"step_{step}"
    if folder.resolve() != own.resolve():
        copy_whole(folder, own)
    checkpoint.continue_from(own)


def copy_whole(folder: Path, target: Path) -> None:
    """A copy of a checkpoint, complete or not there; another checkpoint of that name is replaced."""
    if os.path.lexists(target) and not (target / checkpoint.MANIFEST).is_file():
        raise WriteError(f"{target} exists and is no checkpoint", "give another path")
    aside, replaced = (target.with_name(f".tmp-{target.name}.{kind}.{os.getpid()}") for kind in ("new", "old"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder, aside)
        if target.exists():
            target.rename(replaced)
        aside.rename(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise WriteError(
            f"cannot write checkpoint {target}: {reason}", "make its folder writable, free some space"
        ) from error
    finally:
        for leftover in (aside, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
