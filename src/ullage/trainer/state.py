"""What a run must remember: its step, its place in the data, its best score; saved and restored as checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ullage.base import faults
from ullage.base.communicator import Communicator
from ullage.base.errors import DataError, UllageError, WriteError
from ullage.data.sampler import Sampler
from ullage.engine import checkpoint
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.run_directory import RunDirectory
from ullage.workers.actor import Actor


@dataclass(frozen=True, slots=True)
class Best:
    """The highest evaluation so far."""

    step: int
    score: float


class Keeper:
    """Owner of the run's progress; every rank has one, rank 0 writes."""

    def __init__(
        self,
        directory: RunDirectory,
        actor: Actor,
        sampler: Sampler,
        recorder: Recorder,
        ranks: Communicator,
        *,
        keep: int,
        facts: dict[str, Any],
    ) -> None:
        self.directory = directory
        self.actor = actor
        self.sampler = sampler
        self.recorder = recorder
        self.ranks = ranks
        self.keep = keep
        self.facts = facts
        """What must not change between a run and its resumption: data fingerprint, model shape."""
        self.step = 0
        self.best: Best | None = None
        self._sampler_before = sampler.state()

    @property
    def resume_command(self) -> str:
        return f"ullage resume {self.directory.path}"

    def advance(self, step: int) -> None:
        """A step is complete."""
        self.step = step
        self._sampler_before = self.sampler.state()

    def rewind(self) -> None:
        """Forget a step that was begun and not completed."""
        self.sampler.restore(self._sampler_before)

    def consider(self, step: int, score: float) -> None:
        if self.best is None or score > self.best.score:
            self.best = Best(step, score)

    def save(self) -> None:
        """Publish a checkpoint of the last complete step, then prune; an error on rank 0 is everybody's."""
        error: UllageError | None = None
        with self.recorder.phase("save"):
            faults.strike("save", self.step)
            if self.ranks.rank == 0:
                try:
                    self._write()
                except UllageError as problem:
                    error = problem
            self.ranks.raise_together(error)

    def _write(self) -> None:
        folder = checkpoint.write_checkpoint(
            self.directory.checkpoints,
            self.step,
            tensors={"optimizer": self.actor.optimizer.tensors(), "rng": {"torch": torch.get_rng_state()}},
            state={
                "step": self.step,
                "sampler": self._sampler_before,
                "best": None if self.best is None else [self.best.step, self.best.score],
                "nonfinite_steps": self.actor.nonfinite_steps,
            },
            extra_files=lambda place: self.actor.model.save(place / "model"),
            facts=self.facts,
        )
        protect = {folder}
        if self.best is not None:
            protect.add(self.directory.checkpoint_of(self.best.step))
        for warning in checkpoint.prune(self.directory.checkpoints, self.keep, protect):
            self.recorder.event(warning)

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint whose weights the actor's model was loaded from."""
        saved = checkpoint.read_checkpoint(folder)
        for name, value in self.facts.items():
            if saved.facts.get(name) != value:
                raise DataError(
                    f"{name} changed since {folder.name} was saved: {saved.facts.get(name)} then, {value} now",
                    "resume with the data the run was started with, or start a new run from its weights",
                )
        self.actor.optimizer.restore(saved.tensors["optimizer"])
        torch.set_rng_state(saved.tensors["rng"]["torch"])
        self.sampler.restore(saved.state["sampler"])
        self._sampler_before = self.sampler.state()
        self.step = saved.state["step"]
        self.actor.nonfinite_steps = saved.state["nonfinite_steps"]
        self.best = None if saved.state["best"] is None else Best(*saved.state["best"])

    def export(self) -> None:
        """The trained model as a Hugging Face folder, complete or not there."""
        error: UllageError | None = None
        with self.recorder.phase("save"):
            if self.ranks.rank == 0:
                aside = self.directory.path / ".final.tmp"
                try:
                    shutil.rmtree(aside, ignore_errors=True)
                    self.actor.model.save(aside)
                    shutil.rmtree(self.directory.final, ignore_errors=True)
                    aside.rename(self.directory.final)
                except OSError as problem:
                    error = WriteError(f"cannot write {self.directory.final}: {problem}", "free some disk space")
            self.ranks.raise_together(error)
