"""The plan of a run: every phase against the memory there is, what was chosen, its time, and what levers would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ullage.base.errors import ConfigError, UsageError
from ullage.base.units import bytes_of, bytes_text
from ullage.config.settle import ACTOR_TOKENS, AUTO, NUM_SLOTS, choices_of, open_keys, plainly, settled, with_key
from ullage.config.tree import Config
from ullage.planner.choose import NO_SCALE, capacity_of, choose, with_slack
from ullage.planner.fixes import OPTIMIZER, Fix, fixes
from ullage.planner.hardware import Machine, find_gpu
from ullage.planner.model_shape import Shape
from ullage.planner.parts import parts_of
from ullage.planner.phases import Layout, Phase
from ullage.planner.seconds import step_seconds
from ullage.planner.spread import Spread, best_spread, more_gpus

LEAST_SLOWDOWN = 0.001
"""Levers that cost less time than this share are ranked by what they save."""
LEAST_SAVED = 0.005
"""Levers that save less than this share of the peak are not told."""
REFERENCE = "h200"
"""Whose time is told where no GPU is named."""


@dataclass(frozen=True, slots=True)
class Lever:
    """A key that could be set, and what that would do to the peak and to the time of a step."""

    key: str
    value: object
    saves_bytes: int
    slowdown: float
    """Share of the step's time; below 0 it is faster."""

    @property
    def change(self) -> str:
        return f"{self.key}={str(self.value).lower() if isinstance(self.value, bool) else self.value}"

    @property
    def worth(self) -> float:
        """Bytes saved for each share of time lost."""
        return self.saves_bytes / max(self.slowdown, LEAST_SLOWDOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will need, before anything is loaded."""

    shape: Shape
    config: Config
    """Without open keys."""
    machine: Machine | None
    phases: tuple[Phase, ...]
    seconds: dict[str, float]
    """Of a step, by phase."""
    host: dict[str, int]
    pinned_bytes: int = 0
    """The part of host memory that cannot be swapped out."""
    disk: dict[str, int]
    levers: tuple[Lever, ...] = ()
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    fixes: tuple[Fix, ...] = ()
    """What would make it fit, where it does not."""
    spread: Spread | None = None
    """Where it does not: what it would need if its weights were shared out over the GPUs there are."""
    assumptions: tuple[str, ...] = ()

    @property
    def binding(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Device memory that the run needs: its largest phase, slack and context included."""
        return self.binding.total_bytes

    @property
    def capacity_bytes(self) -> int | None:
        """Of one GPU, as far as the run may use it; None where no machine was given."""
        return None if self.machine is None else capacity_of(self.config, self.machine)

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def fits(self) -> bool | None:
        """None where no machine was given."""
        if self.capacity_bytes is None:
            return None
        return self.peak_bytes <= self.capacity_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        limit = None if self.machine is None else self.machine.host_bytes
        return limit is None or self.host_bytes * self._ranks <= limit

    @property
    def verdict(self) -> str:
        peak, where, capacity = bytes_text(self.peak_bytes), self.binding.name, self.capacity_bytes
        if self.machine is None or capacity is None:
            return f"needs {peak} of device memory; {where} binds"
        there, left = bytes_text(capacity), capacity - self.peak_bytes
        if self.phases[0].components.get("weights", 0) > capacity:
            return f"does not fit: the weights alone are {bytes_text(self.phases[0].components['weights'])} of {there}"
        if left < 0:
            return f"does not fit: {where} needs {peak} of {there}, {bytes_text(-left)} too much"
        if not self.fits_host:
            needed, beside = bytes_text(self.host_bytes * self._ranks), bytes_text(self.machine.host_bytes or 0)
            return f"does not fit: host memory needs {needed}, there is {beside}"
        return f"fits: {where} binds with {peak} of {there}, {bytes_text(left)} to spare"

    @property
    def _ranks(self) -> int:
        """Of a node."""
        return 1 if self.machine is None else self.machine.count

    @property
    def workload(self) -> dict[str, Any]:
        """What a step does, as far as the config says so."""
        data, model = self.config.data, self.config.actor_rollout_ref.model
        return {
            "algorithm": self.config.algorithm.name or self.config.algorithm.adv_estimator or "grpo",
            "lora_rank": model.lora_rank,
            "quantization": model.quantization,
            "prompts": data.train_batch_size,
            "samples": self.config.actor_rollout_ref.rollout.n,
            "prompt_tokens": data.max_prompt_length,
            "response_tokens": data.max_response_length,
        }

    def as_json(self) -> dict[str, Any]:
        """The contract of `plan --json`."""
        return {
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "workload": self.workload,
            "fits": self.fits,
            "capacity_bytes": self.capacity_bytes,
            "peak_bytes": self.peak_bytes,
            "binding_phase": self.binding.name,
            "phases": [
                {"name": phase.name, "components": phase.components, "total_bytes": phase.total_bytes}
                for phase in self.phases
            ],
            "parts": parts_of(self.phases),
            "host": {**self.host, "total_bytes": self.host_bytes, "pinned_bytes": self.pinned_bytes},
            "disk": self.disk,
            "levers": [
                {"change": lever.change, "saves_bytes": lever.saves_bytes, "slowdown": lever.slowdown}
                for lever in self.levers
            ],
            "chosen": self.chosen,
            "seconds": {**self.seconds, "step": self.step_seconds},
            "fixes": [{"change": fix.change, "peak_bytes": fix.peak_bytes, "alters": fix.alters} for fix in self.fixes],
            "sharding": None if self.spread is None else self.spread.as_json(),
            "assumptions": list(self.assumptions),
        }


def plan(
    shape: Shape, config: Config, machine: Machine | None = None, *, scale: Mapping[str, float] = NO_SCALE
) -> Plan:
    """By closed form, in well under 10 ms, and under 100 ms where keys are open that the machine decides.

    Args:
        machine: what it should fit; by default the run's own ranks on GPUs of the size of memory.budget, if it has one.
        scale: measured over predicted memory of earlier runs on this machine, by phase.
    """
    machine = machine or budget_machine(config)
    if machine is None:
        made = _planned(shape, plainly(config, "cuda"), None, scale)
    else:
        choice = choose(shape, config, machine, scale=scale)
        made = _planned(shape, settled(config, choice.values), machine, scale)
        chosen = {key: {"value": choice.values[key], "why": choice.why[key]} for key in open_keys(config)}
        made = replace(made, chosen=chosen)
        if not made.fits:
            made = _with_remedies(made, config, machine, scale)
    return replace(made, levers=tuple(sorted(_levers(made, scale), key=lambda lever: -lever.worth)))


def _with_remedies(made: Plan, config: Config, machine: Machine, scale: Mapping[str, float]) -> Plan:
    """With what would make it fit: changes that Ullage runs, then what more GPUs would do."""
    found = fixes(made.shape, config, machine, scale)
    spread = best_spread(made.shape, config, machine, scale) if machine.gpus > 1 else None
    more = more_gpus(made.shape, config, machine, scale) if spread is None else None
    return replace(made, fixes=(*found, *([more] if more else [])), spread=spread)


def budget_machine(config: Config) -> Machine | None:
    """GPUs of the size of memory.budget, as many as the run has ranks; None where there is no budget."""
    if config.memory.budget == AUTO:
        return None
    trainer = config.trainer
    try:
        gpu = find_gpu(config.memory.budget)
    except UsageError as error:
        raise ConfigError(f"memory.budget = {error.cause}", error.remedy) from None
    return Machine(gpu=gpu, count=trainer.n_gpus_per_node, nodes=trainer.nnodes)


def _planned(shape: Shape, config: Config, machine: Machine | None, scale: Mapping[str, float]) -> Plan:
    ranks = 1 if machine is None else machine.gpus
    layout = Layout(shape, config, ranks=ranks)
    gpu = find_gpu(REFERENCE) if machine is None else machine.gpu
    return Plan(
        shape=shape,
        config=config,
        machine=machine,
        phases=tuple(with_slack(phase, scale) for phase in layout.phases()),
        seconds=step_seconds(layout, gpu),
        host=layout.host(),
        pinned_bytes=sum(layout.pinned().values()),
        disk=layout.disk(),
        assumptions=(*layout.assumptions, *_assumed(config, machine)),
    )


def _assumed(config: Config, machine: Machine | None) -> Iterator[str]:
    if machine is None:
        yield f"seconds are those of one {find_gpu(REFERENCE).name}"
        return
    yield from machine.gpu.assumptions
    there = bytes_text(machine.gpu.memory_bytes)
    if capacity_of(config, machine) < machine.gpu.memory_bytes:
        yield f"memory.budget: {config.memory.budget} of the {there} there are"
    if (bytes_of(config.memory.budget) or 0) > machine.gpu.memory_bytes:
        yield f"memory.budget = {config.memory.budget}: there are only {there}, which is what counts"
    if machine.host_bytes is None:
        yield "host memory suffices; say what there is with --ram"
    if machine.nodes > 1:
        yield "GPUs of different nodes exchange as fast as those of one"


def _levers(made: Plan, scale: Mapping[str, float]) -> Iterator[Lever]:
    """Every lever that is not pulled and would lower the peak."""
    for key, value in _choices(made.config):
        other = _planned(made.shape, with_key(made.config, key, value), made.machine, scale)
        saved = made.peak_bytes - other.peak_bytes
        if saved > LEAST_SAVED * made.peak_bytes:
            yield Lever(key, value, saved, other.step_seconds / made.step_seconds - 1)


def _choices(config: Config) -> Iterator[tuple[str, object]]:
    memory, chosen = config.memory, choices_of(config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    adamw = config.actor_rollout_ref.actor.optim.optimizer == "adamw"
    choices: dict[tuple[str, object], bool] = {
        ("memory.compile", True): not memory.compile,
        ("memory.recompute", "matmuls"): chosen.recompute == "none" and not memory.compile,
        ("memory.recompute", 0.5): chosen.recompute == "none",
        ("memory.recompute", "full"): chosen.recompute != "full",
        ("memory.activation_offload", "async"): chosen.activation_offload == "none",
        ("memory.rounding", "stochastic"): memory.rounding == "master" and chosen.optimizer_state != "host",
        (OPTIMIZER, "adamw_8bit"): adamw and chosen.optimizer_state != "host",
        ("memory.optimizer_state", "streamed"): chosen.optimizer_state == "device",
        ("memory.gradients", "weights"): chosen.gradients == "float32",
        ("memory.gradients", "host"): chosen.gradients != "host",
        ("memory.offload_roles", True): not chosen.offload_roles,
        (ACTOR_TOKENS, longest): chosen.tokens != longest,
        (NUM_SLOTS, max(1, chosen.slots // 2)): chosen.slots > 1,
    }
    return (choice for choice, open_ in choices.items() if open_)
