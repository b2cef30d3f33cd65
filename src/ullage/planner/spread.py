"""Which of a machine's layouts a run takes: the one that exchanges least of those that fit."""

from __future__ import annotations

from ullage.config.tree import Config
from ullage.planner import components as c
from ullage.planner.hardware import Machine
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout
from ullage.planner.sharding import Sharding, divides, shardings


def best_sharding(shape: Shape, config: Config, machine: Machine) -> Sharding | None:
    """Whole replicas where they fit; None where no layout does."""
    layouts = [Layout(shape, config, sharding=sharding) for sharding in shardings(machine) if divides(shape, sharding)]
    for layout in sorted(layouts, key=exchanged_bytes):
        if fits(layout, machine):
            return layout.sharding
    return None


def fits(layout: Layout, machine: Machine) -> bool:
    needed = max(phase.total_bytes + c.SLACK * phase.allocated_bytes for phase in layout.phases())
    host = sum(layout.host().values()) * machine.count
    return needed <= machine.gpu.memory_bytes and (machine.host_bytes is None or host <= machine.host_bytes)


def exchanged_bytes(layout: Layout) -> float:
    """What a rank sends in one step.

    Gradients once around all replicas; weights for every pass that gathers them, a step of decoding included; partial
    sums of two matrices a layer for every token under tensor parallelism, keys and values under sequence parallelism.
    """
    sharding, width, data = layout.sharding, layout.width, layout.config.data
    samples = -(-data.train_batch_size * layout.config.actor_rollout_ref.rollout.n // sharding.data)
    tokens = samples * (data.max_prompt_length + data.max_response_length)
    sampled = not layout.supervised
    passes = 2 + sampled + bool(layout.reference)  # forward and backward, log-probs, reference
    rounds = -(-samples // layout.slots) * data.max_response_length if sampled else 0
    micro_batches = -(-tokens // (layout.update_pass.tokens * sharding.sequence))
    shape, held = layout.actor.shape, layout.roles.actor_weights().bytes
    sent = 2 * width * layout.actor.parameters * _others(sharding.data * sharding.sequence)
    sent += held * _others(sharding.shards) * (passes * micro_batches + rounds)
    everything = (passes + sampled) * tokens * shape.layers * width
    sent += 2 * 2 * everything * shape.hidden * _others(sharding.tensor)
    return sent + 2 * everything * shape.keys * _others(sharding.sequence)


def _others(ranks: int) -> float:
    """The share of a ring's data that crosses a link."""
    return (ranks - 1) / ranks
