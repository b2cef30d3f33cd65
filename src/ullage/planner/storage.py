"""What a run needs beside device memory: RAM, the pinned and the shared part of it, and disk."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ullage.base.process import MAX_AUTO_WORKERS
from ullage.planner import components as c
from ullage.planner.components import MIB

if TYPE_CHECKING:
    from ullage.planner.phases import Layout
    from ullage.planner.roles import Trained

REWARD_WORKER = 32 * MIB
"""A reward worker before its functions load anything: 15 MB measured, and room for what they import."""
NCCL_SEGMENT = 9_637_888
"""Shared memory of one NCCL connection between two GPUs that reach each other through the host (NVIDIA/nccl#1518)."""
SAMPLE_CHARACTERS = 4
"""Bytes of a token in samples/step_N.jsonl, prompt and response as text."""
METRICS = 16 << 10
"""A step's lines in metrics.jsonl, memory.jsonl and logs/."""


def host_bytes(layout: Layout) -> dict[str, int]:
    """Bytes of host memory of one rank, by what holds them."""
    chosen, roles, width = layout.chosen, layout.roles, layout.width
    found = {"process": c.PROCESS, "optimizer": 0, "gradients": 0, "activations": 0, "roles": 0, "checkpoint": 0}
    for role in roles.trained:
        count, piece = layout.part(role.parameters), min(c.PIECE, role.largest)
        state = layout.part(state_bytes(layout, role))
        if chosen.optimizer_state != "device":
            found["optimizer"] += state
        if chosen.optimizer_state == "host":
            found["optimizer"] += 2 * piece * 2 * width + 4 * piece
        if chosen.gradients == "host":
            found["gradients"] += width * (count + c.COURIER_STAGES * piece)
        # A file is written from host memory: what is on the device comes there, one file at a time.
        copied = max(state if chosen.optimizer_state == "device" else 0, width * count)
        found["checkpoint"] = max(found["checkpoint"], copied)
    # Layers that the critic shares with the actor share its host memory.
    for role in roles.trained if layout.leaving else []:
        if role.owns_weights:
            away = sum(layout.stack(role, layout.pass_of(role)).moved)
            found["activations"] += -(-math.ceil(away) // c.SLAB) * c.SLAB
    if layout.parked:
        away_roles = [*roles.critic_weights(), *roles.reference_weights(), *roles.reward_weights()]
        found["roles"] = sum(layout.part(term.bytes) for term in away_roles)
    # Weights are read into host memory in their plain form, one model at a time and before there is anything to save.
    models = [role.shape for role in roles.trained] + ([roles.reward_model] if roles.reward_model else [])
    largest = max(c.weights(shape, width=width).bytes for shape in models)
    found["load"] = max(0, largest - found["checkpoint"])
    found["reward_workers"] = REWARD_WORKER * reward_workers(layout)
    found["shared"] = shared_bytes(layout)
    return found


def pinned_bytes(layout: Layout) -> dict[str, int]:
    """The part of host memory that cannot be swapped out (engine/streams.py); state stepped by the CPU is not."""
    held = host_bytes(layout)
    names = ["gradients", "activations", "roles"]
    names += ["optimizer"] if layout.chosen.optimizer_state == "streamed" else []
    return {name: held[name] for name in names}


def shared_bytes(layout: Layout) -> int:
    """The part in /dev/shm: Ullage puts nothing there; NCCL does, a segment to each neighbour of its ring."""
    return 2 * NCCL_SEGMENT if layout.ranks > 1 else 0


def reward_workers(layout: Layout) -> int:
    """Processes that score answers, beside one rank."""
    reward = layout.config.reward
    if not reward.functions:
        return 0
    return MAX_AUTO_WORKERS if reward.num_workers == "auto" else reward.num_workers


def disk_bytes(layout: Layout) -> dict[str, int]:
    """One checkpoint, those kept while the next is written, the final folder, samples and logs of 1,000 steps."""
    roles, width, whole = layout.roles, layout.width, layout.sharding.tensor
    written = whole * sum(width * role.parameters + state_bytes(layout, role) for role in roles.trained)
    kept = layout.config.trainer.max_ckpt_to_keep + 2  # the best one, and the one being written
    sample = SAMPLE_CHARACTERS * layout.longest * layout.config.trainer.log_samples
    return {
        "checkpoint": written,
        "kept": kept * written,
        "final": whole * width * roles.actor.parameters,
        "logs_of_1000_steps": 1000 * (sample + METRICS),
    }


def state_bytes(layout: Layout, role: Trained) -> int:
    """Moments and master of a role, wherever they are."""
    state = c.moments(role.parameters, role.optim.optimizer).bytes
    return state + (4 * role.parameters if layout.has_master else 0)
