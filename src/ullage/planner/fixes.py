"""What would make a run fit that does not: proposals, since each changes the request or what is learned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce

from ullage.base.units import bytes_text
from ullage.config.settle import ACTOR_TOKENS, AUTO, NUM_SLOTS, PATHS, open_keys, with_key
from ullage.config.tree import Config
from ullage.planner.choose import NO_SCALE, SLOTS, Space, capacity_of, host_limit
from ullage.planner.components import GIB
from ullage.planner.hardware import Machine, gpus
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout
from ullage.planner.sharding import Sharding

BUDGET = "memory.budget"
RESPONSE = "data.max_response_length"
RANK, CRITIC_RANK = "actor_rollout_ref.model.lora_rank", "critic.model.lora_rank"
OPTIMIZER = "actor_rollout_ref.actor.optim.optimizer"
SHORTEST = 128
"""Tokens of a response below which none is proposed."""


@dataclass(frozen=True, slots=True)
class Fix:
    """Something to change, and what the run needs at least then."""

    change: str
    peak_bytes: int
    alters: str
    """What is different about the run, for a person."""


def fixes(shape: Shape, config: Config, machine: Machine, scale: Mapping[str, float]) -> list[Fix]:
    """All that suffice by themselves, the cheapest first: time, exactness, length, adapters, another GPU."""
    found: list[Fix] = []
    for change, alters in _proposals(shape, config):
        if found and RESPONSE in change and RESPONSE in found[-1].change:
            continue  # a longer one suffices
        other = reduce(lambda made, item: with_key(made, *item), change.items(), config)
        peak = least(shape, other, machine, scale)
        if peak is not None and peak <= capacity_of(other, machine):
            found.append(Fix(" ".join(f"{key}={value}" for key, value in change.items()), peak, alters))
    found[:0] = _fewer(shape, config, machine, scale)
    larger = list(_larger(shape, config, machine, scale))
    return [*larger, *found] if config.memory.budget != AUTO else [*found, *larger]


def least(
    shape: Shape,
    config: Config,
    machine: Machine,
    scale: Mapping[str, float] = NO_SCALE,
    sharding: Sharding | None = None,
) -> int | None:
    """Device memory below which no setting of the open keys runs; None: the host's memory does not suffice."""
    space, host = _sparest(shape, config, machine, sharding), host_limit(machine)
    # No capacity: each of these ways is the one that needs least beside what it keeps.
    ways = [way for way in space.ways(machine.gpu, 0, host, scale) if host is None or way.host_bytes <= host]
    if not ways:
        return None
    way = max(ways, key=lambda way: way.spare_bytes)
    return space.peak(way.held, way.made, scale).total_bytes


def _sparest(shape: Shape, config: Config, machine: Machine, sharding: Sharding | None = None) -> Space:
    """Without what only makes it faster."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    values: dict[str, object] = {ACTOR_TOKENS: longest, NUM_SLOTS: SLOTS[0], PATHS["recompute"]: "full"}
    for key in set(values) & set(open_keys(config)):
        config = with_key(config, key, values[key])
    return Space(shape, config, machine.gpus, sharding)


def _proposals(shape: Shape, config: Config) -> Iterator[tuple[dict[str, object], str]]:
    model, adamw = config.actor_rollout_ref.model, config.actor_rollout_ref.actor.optim.optimizer == "adamw"
    master = config.memory.rounding == "master"
    given = {path: AUTO for path in PATHS.values() if path not in open_keys(config)}
    if given:
        yield dict(given), "only time"
    if master:
        yield {"memory.rounding": "stochastic"}, "small updates survive in the mean, without a float32 master"
    if adamw:
        yield {OPTIMIZER: "adamw_8bit"}, "moments in 8 bits"
    if master and adamw:
        yield {"memory.rounding": "stochastic", OPTIMIZER: "adamw_8bit"}, "no master, and moments in 8 bits"
    response = config.data.max_response_length // 2
    while response >= SHORTEST:
        yield {RESPONSE: response}, "longer answers are cut"
        response //= 2
    if model.lora_adapter_path is None:
        ranks: dict[str, object] = {RANK: model.lora_rank or 16}
        if Layout(shape, config).critic is not None:
            ranks[CRITIC_RANK] = config.critic.model.lora_rank or 16
        if not model.lora_rank:
            yield ranks, "adapters are trained, not the weights"
        if model.quantization is None:
            yield {**ranks, "actor_rollout_ref.model.quantization": "nf4"}, "adapters on weights in 4 bits are trained"


def _larger(shape: Shape, config: Config, machine: Machine, scale: Mapping[str, float]) -> Iterator[Fix]:
    """More of this GPU's memory, more of the host's, or the smallest GPU that the run fits as it is."""
    peak = least(shape, config, machine, scale)
    capacity = capacity_of(config, machine)
    if peak is not None and capacity < peak <= machine.gpu.memory_bytes:
        change = f"{BUDGET}={math.ceil(peak / GIB)}GiB"
        yield Fix(change, peak, f"it may use more of the {bytes_text(machine.gpu.memory_bytes)} there are")
    if machine.host_bytes is not None:
        space = _sparest(shape, config, machine)
        ways = [way for way in space.ways(machine.gpu, capacity, None, scale) if way.fits(None)]
        if ways:
            way = min(ways, key=lambda way: way.host_bytes)
            change = f"--ram {math.ceil(way.host_bytes * machine.count / GIB)}GiB"
            yield Fix(change, space.peak(way.held, way.made, scale).total_bytes, "a machine with more host memory")
    larger = [gpu for gpu in gpus() if gpu.trains and peak is not None and gpu.memory_bytes >= peak]
    if peak is not None and peak > machine.gpu.memory_bytes and larger:
        gpu = min(larger, key=lambda gpu: (gpu.memory_bytes, gpu.name))
        yield Fix(f"--gpu {gpu.name!r}", peak, f"a GPU of {bytes_text(gpu.memory_bytes)}")


def _fewer(shape: Shape, config: Config, machine: Machine, scale: Mapping[str, float]) -> Iterator[Fix]:
    """The most of a node's GPUs whose processes its host memory suffices for."""
    counts = range(machine.count - 1, 0, -1) if machine.host_bytes is not None else ()
    for count in (count for count in counts if machine.count % count == 0):
        fewer = replace(machine, count=count)
        peak = least(shape, config, fewer, scale)
        if peak is not None and peak <= capacity_of(config, fewer):
            yield Fix(fewer.option, peak, f"{count} of the GPUs: fewer processes share the host's memory")
            return
