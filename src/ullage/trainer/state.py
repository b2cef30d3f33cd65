"""What a run must remember: its step, its place in the data, its best score; saved and restored as checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ullage.algorithms import Algorithm
from ullage.base.communicator import Communicator
from ullage.base.errors import DataError, UllageError, WriteError
from ullage.data.sampler import PromptSampler
from ullage.engine import checkpoint
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.run_directory import RunDirectory
from ullage.workers.actor import Actor
from ullage.workers.critic import Critic


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The outcome of an evaluation."""

    step: int
    score: float


class Keeper:
    """Owner of the run's progress; every rank has one, rank 0 writes."""

    def __init__(
        self,
        directory: RunDirectory,
        actor: Actor,
        sampler: PromptSampler,
        recorder: Recorder,
        ranks: Communicator,
        *,
        algorithm: Algorithm,
        critic: Critic | None = None,
        keep: int,
        facts: dict[str, Any],
    ) -> None:
        self.directory = directory
        self.actor = actor
        self.critic = critic
        self.algorithm = algorithm
        self.sampler = sampler
        self.recorder = recorder
        self.ranks = ranks
        self.keep = keep
        self.facts = facts
        """What must not change between a run and its resumption: data fingerprint, model shape."""
        self.step = 0
        """The last complete one."""
        self.evaluated: Evaluated | None = None
        """The last evaluation."""
        self.best: Evaluated | None = None
        """The best evaluation of a step that has a checkpoint; that checkpoint is kept."""
        self._sampler_before = sampler.state()
        self._saved: dict[str, Any] | None = None

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
        """Held-out prompts scored so much at this step."""
        self.evaluated = Evaluated(step, score)

    @property
    def recorded_until(self) -> int:
        """The step whose measurements belong to the saved state; -1 where not even step 0's evaluation does."""
        return -1 if self.step == 0 and self.evaluated is None else self.step

    def save(self) -> None:
        """Publish a checkpoint of the last complete step, then prune; an error on rank 0 is everybody's."""
        with self.recorder.phase("save"):
            if self.is_best(self.step):
                self.best = self.evaluated
            state = self._state()
            if state != self._saved:  # asked to stop right after a checkpoint: there is nothing new to save
                self._on_first_rank(lambda: self._write(state))
                self._saved = state

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
        if self.critic:
            self.critic.model.restore(saved.tensors["critic"])
            self.critic.optimizer.restore(saved.tensors["critic_optimizer"])
            self.critic.nonfinite_steps = saved.state["critic_nonfinite_steps"]
        torch.set_rng_state(saved.tensors["rng"]["torch"])
        self.sampler.restore(saved.state["sampler"])
        self._sampler_before = self.sampler.state()
        self.step = saved.state["step"]
        self.actor.nonfinite_steps = saved.state["nonfinite_steps"]
        self.algorithm.restore(saved.state["algorithm"])
        self.evaluated = _evaluated(saved.state["evaluated"])
        self.best = _evaluated(saved.state["best"])
        self._saved = saved.state

    def export(self) -> None:
        """The trained model as a Hugging Face folder, complete or not there."""
        with self.recorder.phase("export"):
            self._on_first_rank(self._write_final)

    def is_best(self, step: int) -> bool:
        """Whether this step was evaluated, and higher than any other that has a checkpoint."""
        now = self.evaluated
        return now is not None and 0 < now.step == step and (self.best is None or now.score > self.best.score)

    def _on_first_rank(self, write: Callable[[], None]) -> None:
        error: UllageError | None = None
        if self.ranks.rank == 0:
            try:
                write()
            except UllageError as problem:
                error = problem
        self.ranks.raise_together(error)

    def _state(self) -> dict[str, Any]:
        critic = {"critic_nonfinite_steps": self.critic.nonfinite_steps} if self.critic else {}
        return critic | {
            "step": self.step,
            "sampler": self._sampler_before,
            "evaluated": None if self.evaluated is None else [self.evaluated.step, self.evaluated.score],
            "best": None if self.best is None else [self.best.step, self.best.score],
            "nonfinite_steps": self.actor.nonfinite_steps,
            "algorithm": self.algorithm.state(),
        }

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        tensors = {"optimizer": self.actor.optimizer.tensors(), "rng": {"torch": torch.get_rng_state()}}
        if self.critic:
            tensors |= {"critic": self.critic.model.tensors(), "critic_optimizer": self.critic.optimizer.tensors()}
        return tensors

    def _write(self, state: dict[str, Any]) -> None:
        folder = checkpoint.write_checkpoint(
            self.directory.checkpoints,
            self.step,
            tensors=self._tensors(),
            state=state,
            extra_files=lambda place: self.actor.model.save(place / "model"),
            facts=self.facts,
        )
        protect = {folder}
        if self.best is not None:
            protect.add(self.directory.checkpoint_of(self.best.step))
        for warning in checkpoint.prune(self.directory.checkpoints, self.keep, protect):
            self.recorder.event(warning)

    def _write_final(self) -> None:
        aside = self.directory.path / ".final.tmp"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            self.actor.model.save_merged(aside)
            if self.actor.model.adapters is not None:
                self.actor.model.save(aside / "adapter")
            shutil.rmtree(self.directory.final, ignore_errors=True)
            aside.rename(self.directory.final)
        except (OSError, SafetensorError) as problem:
            shutil.rmtree(aside, ignore_errors=True)
            raise WriteError(
                f"cannot write {self.directory.final}: {problem}",
                f"free some disk space, then finish with: {self.resume_command}",
            ) from problem


def _evaluated(saved: list[Any] | None) -> Evaluated | None:
    return None if saved is None else Evaluated(*saved)
