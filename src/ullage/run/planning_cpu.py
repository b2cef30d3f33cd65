"""The plan of a run on a CPU: the same formulas in a CPU's widths, in a process instead of a CUDA context."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import psutil

from ullage.config.settle import ACTOR_TOKENS, AUTO, NUM_SLOTS, SLOTS, open_keys, plain, settled, with_key
from ullage.config.tree import Config
from ullage.planner.choose import with_slack
from ullage.planner.components import MIB, term
from ullage.planner.fixes import BUDGET, Fix
from ullage.planner.hardware import Machine
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout, Phase
from ullage.planner.plan import Plan

DTYPE = "actor_rollout_ref.model.dtype"
RECOMPUTE = "memory.recompute"
LADDER = (RECOMPUTE, ACTOR_TOKENS, NUM_SLOTS)
"""Keys that save memory on a CPU, the cheapest first: what moves to the host stays where it is."""
ELSEWHERE = ("optimizer", "gradients", "activations", "roles")
"""What a config may keep in host memory."""
SPARE = 1.1
"""Of a budget that is proposed: a process is never the same size twice."""
ASSUMED = (
    "a CPU: weights are float32 unless the config says otherwise, and there is no CUDA context",
    "host and device memory are one, which every phase counts",
    "the formulas are those of the code for GPUs; on CPUs they were not measured",
)


def plan_on_cpu(shape: Shape, config: Config, machine: Machine) -> Plan:
    """With plain values, or the first of ever smaller ones that fits; with the last, and fixes, where none does."""
    made = _first_that_fits(shape, config, machine)
    return made if made.fits else replace(made, fixes=tuple(_fixes(made, shape, config, machine)))


def _first_that_fits(shape: Shape, config: Config, machine: Machine) -> Plan:
    for values in _ladder(config):
        made = _planned(shape, settled(config, values), machine)
        if made.fits:
            break
    chosen = {key: {"value": values[key], "why": "the plain value on a CPU"} for key in open_keys(config)}
    for key in set(LADDER) & set(chosen):
        if values[key] != plain(config, "cpu")[key]:
            chosen[key]["why"] = "with more it does not fit"
    return replace(made, chosen=chosen)


def _ladder(config: Config) -> Iterator[dict[str, object]]:
    longest = config.data.max_prompt_length + config.data.max_response_length
    changes: list[tuple[str, object]] = [(RECOMPUTE, "full"), (ACTOR_TOKENS, longest)]
    changes += [(NUM_SLOTS, SLOTS >> halvings) for halvings in range(1, SLOTS.bit_length())]
    values = plain(config, "cpu")
    yield values
    for key, value in changes:
        values = {**values, key: value}
        yield values


def _planned(shape: Shape, config: Config, machine: Machine) -> Plan:
    auto = config.actor_rollout_ref.model.dtype == AUTO
    layout = Layout(shape, with_key(config, DTYPE, "float32") if auto else config, ranks=machine.gpus)
    process = term("context", psutil.Process().memory_info().rss, "this process before anything is loaded")
    on_host = layout.host()
    moved = term("host", sum(on_host.get(name, 0) for name in ELSEWHERE), "kept in host memory, which is the same")

    def here(phase: Phase) -> Phase:
        kept = tuple(item for item in phase.terms if item.name not in ("context", "buffers", "graphs"))
        return with_slack(replace(phase, terms=(*kept, moved, process)))

    return Plan(
        shape=shape,
        config=config,
        machine=machine,
        phases=tuple(here(phase) for phase in layout.phases()),
        seconds={},
        host={},
        pinned_bytes=0,
        disk=layout.disk(),
        assumptions=(*(text for text in layout.assumptions if "NCCL" not in text), *ASSUMED),
    )


def _fixes(made: Plan, shape: Shape, config: Config, machine: Machine) -> Iterator[Fix]:
    """Keys that were given and need not be; more of the memory there is."""
    given = [key for key in LADDER if key not in open_keys(config)]
    opened = config
    for key in given:
        opened = with_key(opened, key, AUTO)
    other = _first_that_fits(shape, opened, machine)
    if given and other.fits:
        yield Fix(" ".join(f"{key}={AUTO}" for key in given), other.peak_bytes, "only time")
    if made.peak_bytes <= machine.gpu.memory_bytes:
        enough = math.ceil(SPARE * made.peak_bytes / MIB)
        yield Fix(f"{BUDGET}={enough}MiB", made.peak_bytes, "it may use more")
