"""The plan of a run: every phase against the memory there is, what binds, and what each lever would save and cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ullage.base.units import bytes_text
from ullage.config.settle import ACTOR_TOKENS, NUM_SLOTS, choices_of, plainly, with_key
from ullage.config.tree import Config
from ullage.planner import components as c
from ullage.planner.hardware import Machine
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout, Phase

SLACK = 0.03
"""Over what is allocated: with expandable segments 12 of 12 runs went through at 1.015 of their predicted least."""
UNKNOWN_SLOWDOWN = 0.5
"""Where a lever's cost has not been measured it is ranked as if it were this."""

SPEED, STATE, ACTIVATIONS = (
    f"benchmarks/results/update_h200_{name}.json" for name in ("speed", "state", "activations")
)
OPTIMIZER = "actor_rollout_ref.actor.optim.optimizer"


@dataclass(frozen=True, slots=True)
class Cost:
    """Share of the update's time that a lever takes, optimizer included: a 7B shape, 15k tokens, one H200."""

    slowdown: float | None
    source: str


COSTS: dict[tuple[str, object], Cost] = {
    ("memory.compile", True): Cost(-0.13, SPEED),
    ("memory.recompute", 0.5): Cost(0.09, ACTIVATIONS),
    ("memory.recompute", "full"): Cost(0.18, ACTIVATIONS),
    ("memory.activation_offload", "async"): Cost(0.04, ACTIVATIONS),
    ("memory.rounding", "stochastic"): Cost(0.2, ACTIVATIONS),
    ("memory.optimizer_state", "streamed"): Cost(1.05, STATE),
    ("memory.optimizer_state", "host"): Cost(2.45, STATE),
}
"""Measured; offload with all layers recomputed, where it moves least."""
NOT_MEASURED = Cost(None, "not measured")


@dataclass(frozen=True, slots=True)
class Lever:
    """A key that could be set, and what that would do to the peak."""

    key: str
    value: object
    saves_bytes: int
    cost: Cost

    @property
    def change(self) -> str:
        return f"{self.key}={str(self.value).lower() if isinstance(self.value, bool) else self.value}"

    @property
    def worth(self) -> float:
        """Bytes saved for each share of time lost."""
        lost = UNKNOWN_SLOWDOWN if self.cost.slowdown is None else self.cost.slowdown
        return self.saves_bytes / max(lost, 0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will need, before anything is loaded."""

    shape: Shape
    machine: Machine | None
    phases: tuple[Phase, ...]
    host: dict[str, int]
    disk: dict[str, int]
    levers: tuple[Lever, ...] = ()
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    @property
    def binding(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Device memory that the run needs: its largest phase, slack and context included."""
        return self.binding.total_bytes

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def fits(self) -> bool | None:
        """None where no machine was given."""
        if self.machine is None:
            return None
        return self.peak_bytes <= self.machine.gpu.memory_bytes and self.fits_host

    @property
    def fits_host(self) -> bool:
        limit = None if self.machine is None else self.machine.host_bytes
        return limit is None or self.host_bytes * self._ranks <= limit

    @property
    def verdict(self) -> str:
        peak, where = bytes_text(self.peak_bytes), self.binding.name
        if self.machine is None:
            return f"needs {peak} of device memory; {where} binds"
        if not self.fits_host:
            needed, there = bytes_text(self.host_bytes * self._ranks), bytes_text(self.machine.host_bytes or 0)
            return f"does not fit: host memory needs {needed}, there is {there}"
        left = self.machine.gpu.memory_bytes - self.peak_bytes
        there = bytes_text(self.machine.gpu.memory_bytes)
        if left < 0:
            return f"does not fit: {where} needs {peak} of {there}, {bytes_text(-left)} too much"
        return f"fits: {where} binds with {peak} of {there}, {bytes_text(left)} to spare"

    @property
    def _ranks(self) -> int:
        """Of a node."""
        return 1 if self.machine is None else self.machine.count

    def as_json(self) -> dict[str, Any]:
        """The contract of `plan --json`."""
        return {
            "model": self.shape.name,
            "parameters": self.shape.parameters,
            "fits": self.fits,
            "capacity_bytes": None if self.machine is None else self.machine.gpu.memory_bytes,
            "peak_bytes": self.peak_bytes,
            "binding_phase": self.binding.name,
            "phases": [
                {"name": phase.name, "components": phase.components, "total_bytes": phase.total_bytes}
                for phase in self.phases
            ],
            "host": {**self.host, "total_bytes": self.host_bytes},
            "disk": self.disk,
            "levers": [
                {"change": lever.change, "saves_bytes": lever.saves_bytes, "slowdown": lever.cost.slowdown}
                for lever in self.levers
            ],
            "chosen": self.chosen,
            "assumptions": list(self.assumptions),
        }


def plan(shape: Shape, config: Config, machine: Machine | None = None) -> Plan:
    """By closed form, in well under 10 ms."""
    made = _planned(shape, config, machine)
    levers = sorted(_levers(made, shape, config, machine), key=lambda lever: -lever.worth)
    return replace(made, levers=tuple(levers))


def _planned(shape: Shape, config: Config, machine: Machine | None) -> Plan:
    layout = Layout(shape, config, ranks=1 if machine is None else machine.gpus)
    guessed = machine.gpu.assumption if machine is not None else ""
    return Plan(
        shape=shape,
        machine=machine,
        phases=tuple(with_slack(phase) for phase in layout.phases()),
        host=layout.host(),
        disk=layout.disk(),
        assumptions=(*layout.assumptions, *([guessed] if guessed else [])),
    )


def with_slack(phase: Phase) -> Phase:
    """The phase with what the allocator needs beyond what is allocated."""
    slack = c.term("slack", SLACK * phase.allocated_bytes, f"{SLACK:.0%} of what is allocated, expandable segments")
    return replace(phase, terms=(*phase.terms, slack))


def _levers(made: Plan, shape: Shape, config: Config, machine: Machine | None) -> Iterator[Lever]:
    """Every lever that is not pulled and would lower the peak."""
    for key, value in _choices(config):
        other = _planned(shape, with_key(config, key, value), machine)
        saved = made.peak_bytes - other.peak_bytes
        if saved > c.MIB:
            yield Lever(key, value, saved, COSTS.get((key, value), NOT_MEASURED))


def _choices(config: Config) -> Iterator[tuple[str, object]]:
    memory, chosen = config.memory, choices_of(plainly(config, "cuda"))
    longest = config.data.max_prompt_length + config.data.max_response_length
    adamw = config.actor_rollout_ref.actor.optim.optimizer == "adamw"
    choices: dict[tuple[str, object], bool] = {
        ("memory.compile", True): not memory.compile,
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
