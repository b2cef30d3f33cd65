"""A plan that the run's own code has the last word on: closed forms choose, a trace of what was chosen decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ullage.base.units import bytes_text
from ullage.config.settle import with_key
from ullage.config.tree import Config
from ullage.model.target import Target
from ullage.planner.components import CONTEXT, NCCL, SLACK
from ullage.planner.hardware import GPU, Machine
from ullage.planner.model_shape import Shape
from ullage.planner.plan import Plan, plan
from ullage.run.predict import Prediction, predict, predict_shallow
from ullage.run.trace_phases import TracedTarget, traced_target

TRIES = 3
"""Choices that are traced before the best of them is taken."""
NEAR = 1.05
"""A run that needs so much of what there is, or more, is traced through every layer and replayed."""
WITHIN = {"update": ("update", "optimizer_step")}
"""Phases of a plan that a trace sees as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPlan:
    """A plan, and what a trace of it allocates."""

    plan: Plan
    traced: Prediction
    scale: Mapping[str, float]
    """What closed forms are multiplied by, phase by phase, to give what was traced and what earlier runs measured."""

    def as_json(self) -> dict[str, Any]:
        found = self.traced
        return {
            "phases": found.phases,
            "least_bytes": found.least_bytes,
            "graphs_bytes": found.graphs_bytes,
            "host_bytes": found.host_bytes,
        }

    def lines(self) -> list[str]:
        """For a person."""
        found = self.traced
        rows = [f"  {name:<15}{bytes_text(size):>11}" for name, size in found.phases.items()]
        least = "" if found.least_bytes is None else f"; the allocator needs at least {bytes_text(found.least_bytes)}"
        kept = f"; beside that, {bytes_text(found.graphs_bytes)} are captured graphs'" if found.graphs_bytes else ""
        return ["", f"traced: what torch allocates at the peak of each phase{kept}{least}", *rows]


def traced_plan(
    shape: Shape, config: Config, machine: Machine, target: Target, scale: Mapping[str, float]
) -> TracedPlan:
    """The fastest plan whose trace fits; where none does, the last one tried, which says that it does not fit.

    Args:
        scale: measured over planned memory of earlier runs here, by phase.
    """
    stand_in = traced_target(target.capability, target.memory_bytes)
    best: TracedPlan | None = None
    ratios, tried = dict(scale), set[str]()
    for _ in range(TRIES):
        chosen = plan(shape, config, machine, scale=ratios)
        key = chosen.config.model_dump_json()
        if key in tried:
            break
        tried.add(key)
        made = _traced(chosen, machine, stand_in, scale)
        ratios = dict(made.scale)
        if made.plan.fits and (best is None or made.plan.step_seconds < best.plan.step_seconds):
            best = made
    return best or made


def traced_for(shape: Shape, config: Config, machine: Machine, model: str) -> TracedPlan:
    """The same for a machine that is not this one, traced through every layer."""
    config = with_key(config, "actor_rollout_ref.model.path", model)
    found = traced_plan(shape, config, machine, stand_in_of(machine.gpu), {})
    if found.traced.least_bytes is not None:
        return found
    own = of_rank(found.plan.config, machine.gpus)
    return replace(found, traced=predict(own, model, stand_in_of(machine.gpu)))


def stand_in_of(gpu: GPU) -> TracedTarget:
    """A device that chooses kernels as this GPU would."""
    major, _, minor = (gpu.compute_capability or "9.0").partition(".")
    return traced_target((int(major), int(minor or 0)), gpu.memory_bytes)


def _traced(chosen: Plan, machine: Machine, stand_in: TracedTarget, scale: Mapping[str, float]) -> TracedPlan:
    model, own = chosen.config.actor_rollout_ref.model.path, of_rank(chosen.config, machine.gpus)
    found = predict_shallow(own, model, stand_in)
    outside = CONTEXT + (NCCL if machine.gpus > 1 else 0)
    room = (chosen.capacity_bytes or 0) - outside - found.graphs_bytes
    if (1 + SLACK) * found.peak_bytes * NEAR > room > found.peak_bytes:
        found = predict(own, model, stand_in)
    ratios = dict(scale)
    closed = {phase.name: phase.allocated_bytes for phase in chosen.phases}
    for name, size in found.phases.items():
        parts = [part for part in WITHIN.get(name, (name,)) if part in closed]
        if parts:
            ratio = (size + outside - CONTEXT) / max(closed[part] for part in parts)
            ratios |= {part: ratio * scale.get(part, 1.0) for part in parts}
    # The same choice, its phases as large as they were traced.
    exact = plan(chosen.shape, chosen.config, machine, scale=ratios)
    return TracedPlan(plan=replace(exact, chosen=chosen.chosen), traced=found, scale=ratios)


def of_rank(config: Config, ranks: int) -> Config:
    """One rank's part of the batch, as a config of its own."""
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    config = with_key(config, "data.train_batch_size", -(-config.data.train_batch_size // ranks))
    if mini is None:
        return config
    return with_key(config, "actor_rollout_ref.actor.ppo_mini_batch_size", -(-mini // ranks))
