"""Runs whose weights are shared out over GPUs: the layout that would be fastest, and how many GPUs it takes.

Ullage runs whole replicas only: what is found here is told, and never called fitting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ullage.config.settle import NUM_SLOTS, open_keys, settled, with_key
from ullage.config.tree import Config
from ullage.planner.choose import NO_SCALE, SLOTS, Space, capacity_of, host_limit, with_slack
from ullage.planner.components import CONTEXT
from ullage.planner.fixes import Fix, least
from ullage.planner.hardware import Machine
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout, Phase
from ullage.planner.seconds import step_seconds
from ullage.planner.sharding import Sharding, divides, shardings

TRIED = 2
"""Layouts whose open keys are searched: the fastest with plain keys of those that fit."""
NODE = 8
"""GPUs of a node, where more are proposed than there are."""
MOST_NODES = 16
NOT_YET = "which Ullage cannot do yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What a run would need on each GPU, and how long it would take."""

    sharding: Sharding
    config: Config
    """Without open keys."""
    chosen: dict[str, object]
    """Keys that were open, by path."""
    phases: tuple[Phase, ...]
    seconds: dict[str, float]
    host: dict[str, int]
    """Of one rank."""
    assumptions: tuple[str, ...]

    @property
    def binding(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.binding.total_bytes

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def text(self) -> str:
        """`shared out over 8 GPUs (data 8, shards 8)`."""
        return f"shared out over {self.sharding.ranks} GPUs ({self.sharding.text})"

    def as_json(self) -> dict[str, Any]:
        parts = self.sharding
        return {
            "supported": False,
            "data": parts.data,
            "tensor": parts.tensor,
            "sequence": parts.sequence,
            "shards": parts.shards,
            "peak_bytes": self.peak_bytes,
            "binding_phase": self.binding.name,
            "phases": [
                {"name": phase.name, "components": phase.components, "total_bytes": phase.total_bytes}
                for phase in self.phases
            ],
            "host": {**self.host, "total_bytes": self.host_bytes},
            "seconds": {**self.seconds, "step": self.step_seconds},
            "chosen": self.chosen,
            "assumptions": list(self.assumptions),
        }


def best_spread(shape: Shape, config: Config, machine: Machine, scale: Mapping[str, float] = NO_SCALE) -> Spread | None:
    """The fastest layout over all GPUs that is not whole replicas and would fit; None where none does."""
    capacity, host = capacity_of(config, machine), host_limit(machine)
    spaces = [Space(shape, config, machine.gpus, sharding) for sharding in _fitting(shape, config, machine, scale)]
    found = [(space, *space.best(machine.gpu, capacity, host, scale)) for space in spaces]
    fitting = [(way.seconds, space, way) for space, way, fits in found if fits]
    if not fitting:
        return None
    _, space, way = min(fitting, key=lambda each: each[0])
    layout, opened = space.layout(way.held, way.made), open_keys(config)
    return Spread(
        sharding=layout.sharding,
        config=settled(config, way.values),
        chosen={key: way.values[key] for key in opened},
        phases=tuple(with_slack(phase, scale) for phase in layout.phases()),
        seconds=step_seconds(layout, machine.gpu),
        host=layout.host(),
        assumptions=tuple(layout.assumptions),
    )


def _fitting(shape: Shape, config: Config, machine: Machine, scale: Mapping[str, float]) -> Iterator[Sharding]:
    """The first few, the fastest with plain keys first, that fit with what needs least."""
    capacity, quick = capacity_of(config, machine), config
    if NUM_SLOTS in open_keys(config):
        quick = with_key(config, NUM_SLOTS, SLOTS[-1])
    layouts = [
        Layout(shape, quick, sharding=sharding)
        for sharding in shardings(machine)
        if sharding != Sharding(data=machine.gpus) and divides(shape, sharding)
    ]
    found = 0
    for layout in sorted(layouts, key=lambda layout: sum(step_seconds(layout, machine.gpu).values())):
        if layout.part(layout.roles.actor_weights().bytes) + CONTEXT > capacity:
            continue
        needed = least(shape, config, machine, scale, layout.sharding)
        if needed is not None and needed <= capacity:
            yield layout.sharding
            found += 1
        if found == TRIED:
            return


def more_gpus(shape: Shape, config: Config, machine: Machine, scale: Mapping[str, float] = NO_SCALE) -> Fix | None:
    """The fewest GPUs of this kind that would hold the run between them; None where hundreds do not."""
    for more in _larger(machine):
        found = thinnest(shape, config, more, scale)
        if found is not None:
            sharding, needed = found
            text = f"weights, gradients and state shared out over {more.gpus} GPUs ({sharding.text}), {NOT_YET}"
            return Fix(more.option, needed, text)
    return None


def thinnest(
    shape: Shape, config: Config, machine: Machine, scale: Mapping[str, float] = NO_SCALE
) -> tuple[Sharding, int] | None:
    """A layout that fits with everything shared out, and what it needs: layers gathered whole, or, where one is too
    large for that, each of them in parts; None where neither fits."""
    whole = Sharding(data=machine.gpus, shards=machine.gpus)
    for sharding in (whole, Sharding(data=machine.nodes, tensor=machine.count, shards=machine.nodes)):
        needed = least(shape, config, machine, scale, sharding) if divides(shape, sharding) else None
        if needed is not None and needed <= capacity_of(config, machine):
            return sharding, needed
    return None


def _larger(machine: Machine) -> Iterator[Machine]:
    """Machines with more GPUs: up to a node of eight, then more nodes. Each of them has as much host memory."""
    count = machine.count
    while machine.nodes == 1 and 2 * count <= NODE:
        count *= 2
        yield replace(machine, count=count)
    nodes = 2 * machine.nodes
    while nodes <= MOST_NODES:
        yield replace(machine, count=count, nodes=nodes)
        nodes *= 2
