"""Whole GRPO steps of large models under a memory cap: rollout, log-probs, update; peak by phase and component."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ullage.bench.clock import free, synchronize
from ullage.bench.report import GIB
from ullage.bench.shapes import shape_config
from ullage.config.load import load_mapping
from ullage.config.settle import ACTOR_TOKENS, NUM_SLOTS, plainly
from ullage.config.tree import Config
from ullage.engine.measure import MemoryProbe
from ullage.engine.replay import Replays
from ullage.model.target import Target
from ullage.rollout.sampling import Sample
from ullage.run.rehearsal import Rehearsal
from ullage.run.roles import register_memory

FRUGAL = {
    "memory.rounding": "stochastic",
    "memory.optimizer_state": "streamed",
    "memory.recompute": "full",
    "memory.activation_offload": "async",
    "actor_rollout_ref.actor.optim.optimizer": "adamw_8bit",
}
"""Two bytes of weights and two of gradients for a parameter; everything else waits on the host."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a cap, and the keys that make it fit."""

    shape: str
    cap_gib: float | None
    settings: Mapping[str, Any]
    prompts: int = 8
    samples: int = 8
    prompt_tokens: int = 512
    response_tokens: int = 512
    micro_batch: int = 2048
    slots: int = 64
    """Samples decoded at once; with adapters there are no large gradients whose memory the cache could lie in."""
    ends_every: int = 0
    """One token of the vocabulary in so many ends a sample, so that lengths vary; 0: all are as long as they may be."""


CASES = {
    "tiny": Case(shape="tiny", cap_gib=None, settings=FRUGAL, prompts=2, samples=2, prompt_tokens=8, response_tokens=8),
    "3B": Case(shape="3B", cap_gib=16, settings=FRUGAL),
    "8B": Case(shape="8B", cap_gib=40, settings=FRUGAL),
    "14B": Case(shape="14B", cap_gib=80, settings=FRUGAL),
    "32B": Case(shape="32B", cap_gib=None, settings=FRUGAL),
    "7B QLoRA": Case(
        shape="7B",
        cap_gib=10,
        settings={
            "actor_rollout_ref.model.lora_rank": 16,
            "actor_rollout_ref.model.quantization": "nf4",
            "memory.recompute": "full",
            "memory.activation_offload": "async",
        },
        slots=32,
    ),
    "32B LoRA": Case(
        shape="32B",
        cap_gib=80,
        settings={"actor_rollout_ref.model.lora_rank": 16, "memory.recompute": "full"},
        slots=32,
    ),
}


def fit(name: str, target: Target, *, steps: int = 1) -> dict[str, Any]:
    """One row: whether the step went through under the cap, seconds of its phases, peak bytes of each, components."""
    case = CASES[name]
    with capped(case.cap_gib, target):
        try:
            return {"case": name} | _run(case, target, steps)
        except torch.OutOfMemoryError as error:
            return {"case": name, "cap_gib": case.cap_gib, "fits": False, "why": str(error).splitlines()[0]}
        finally:
            free(target)


def _run(case: Case, target: Target, steps: int) -> dict[str, Any]:
    began = time.perf_counter()
    training = Training(case, target)
    synchronize(target)
    ready = time.perf_counter() - began
    training.phases.seconds.clear()  # of loading, which is told apart
    for step in range(1, steps + 1):
        training.step(step)
    phases = training.phases
    return {
        "cap_gib": case.cap_gib,
        "fits": True,
        "parameters": sum(p.numel() for p in training.actor.model.module.parameters()),
        "load_s": round(ready, 1),
        "step_s": round(sum(phases.seconds.values()), 1),
        "seconds": {phase: round(value, 2) for phase, value in phases.seconds.items()},
        "peak_gib": {phase: round(value / GIB, 2) for phase, value in phases.peaks.items()},
        "device_used_gib": round(phases.device_used / GIB, 2),
        "components_gib": {owner: round(value / GIB, 2) for owner, value in phases.probe.owners.items()},
        "host_gib": round(sum(training.actor.optimizer.host_nbytes().values()) / GIB, 2),
        "replays": len(training.lines),
    }


class Training(Rehearsal):
    """A GRPO run with random weights, and its steps."""

    def __init__(self, case: Case, target: Target) -> None:
        self.case = case
        self.current_step = 0
        self.phases = Phases(target)
        self.lines: list[str] = []
        """One for each phase that ran out of memory and was repeated."""
        architecture = shape_config(case.shape)
        super().__init__(
            case_config(case),
            architecture,
            target,
            self.phases,
            stop_ids=frozenset(range(0, architecture.vocab_size, case.ends_every)) if case.ends_every else None,
            replays=Replays(say=self.lines.append),
        )
        register_memory(self.phases.probe, self.actor, self.critic, self.reference, self.engine)

    def step(self, step: int = 1) -> list[Sample]:
        self.current_step = step
        return super().step(step)


class Phases:
    """Of each phase by name: the seconds it took last, and its highest peak."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.probe = MemoryProbe(target)
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self.device_used = 0
        self.current: str | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.current = name
        synchronize(self.target)
        self.probe.start_phase()
        began = time.perf_counter()
        yield
        synchronize(self.target)
        self.seconds[name] = time.perf_counter() - began
        self.peaks[name] = max(self.peaks.get(name, 0), self.probe.end_phase()[0])
        if self.target.kind == "cuda":
            left, whole = torch.cuda.mem_get_info(self.target.device)
            self.device_used = max(self.device_used, whole - left)


def case_config(case: Case) -> Config:
    """The settled config of a run like this."""
    given = {
        "algorithm.name": "grpo",
        "data.train_batch_size": case.prompts,
        "data.max_prompt_length": case.prompt_tokens,
        "data.max_response_length": case.response_tokens,
        "actor_rollout_ref.rollout.n": case.samples,
        ACTOR_TOKENS: case.micro_batch,
        NUM_SLOTS: case.slots,
    }
    return plainly(load_mapping({**given, **case.settings}).config, "cuda")


@contextmanager
def capped(gib: float | None, target: Target) -> Iterator[None]:
    """torch's own limit on this process: what a smaller card would do."""
    if gib is None or target.kind != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / target.memory_bytes), target.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, target.device)
