"""A run that does not fit: what holds the memory, how much there is, and which keys would make it fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ullage.base.errors import DoesNotFitError
from ullage.base.units import bytes_text
from ullage.config.settle import choices_of
from ullage.config.tree import Config
from ullage.engine.replay import is_out_of_memory
from ullage.model.target import Target
from ullage.run.surroundings import Surroundings
from ullage.telemetry.run_directory import write_atomically
from ullage.telemetry.writer import json_text

UPDATES = ("update", "update_critic")
HEADER = f"{'the most that was':<17}{'held':>12}{'planned':>12}"


@contextmanager
def fitting(given: Surroundings) -> Iterator[None]:
    """Memory that ran out for good is a DoesNotFitError: nothing was left to repeat in smaller pieces."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if given.target.kind == "cuda":
            write_snapshot(given, error)
        raise does_not_fit(given, error) from error


def does_not_fit(given: Surroundings, error: BaseException) -> DoesNotFitError:
    phase = given.recorder.current_phase or "loading"
    held, planned = given.probe.highest, given.planned.components.get(phase, {})
    sizes = {name: (held.get(name, 0), planned.get(name, 0)) for name in dict.fromkeys([*held, *planned])}
    sizes["capacity"] = capacity(given.target), given.planned.capacity_bytes or 0
    rows = [f"  {name:<15}{_size(one):>12}{_size(other):>12}" for name, (one, other) in sizes.items() if one or other]
    message = str(error).split(" If reserved but")[0].strip().splitlines() or [type(error).__name__]
    remedy = f"set one or more of: {', '.join(levers(given.config, phase))}"
    if given.directory.metrics.exists():  # else nothing is left of the run
        remedy += f"; continue with: ullage resume {given.directory.path} KEY=VALUE"
    return DoesNotFitError("\n".join([f"{phase} does not fit: {message[0]}", HEADER, *rows]), remedy)


def levers(config: Config, phase: str) -> list[str]:
    """Keys that leave more memory for a phase and are not pulled yet, the cheapest first."""
    memory, chosen = config.memory, choices_of(config)
    longest = config.data.max_prompt_length + config.data.max_response_length
    trains, samples = phase in UPDATES, phase in ("rollout", "eval")
    found = {
        "memory.replay=true": not memory.replay,
        # Where replay is on, passes have already become as small as they can.
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={longest}": not (memory.replay or samples)
        and chosen.tokens > longest,
        f"actor_rollout_ref.rollout.max_num_seqs={chosen.slots // 2}": chosen.slots > 1,
        "memory.recompute=full": trains and chosen.recomputed_share < 1,
        "memory.offload_roles=true": not chosen.offload_roles,
        "memory.optimizer_state=streamed": chosen.optimizer_state == "device",
        "memory.gradients=host": chosen.gradients != "host",
        "memory.activation_offload=async": trains and chosen.activation_offload == "none",
        "data.max_response_length (shorter)": True,
        "actor_rollout_ref.model.lora_rank=16 (in a new run)": config.actor_rollout_ref.model.lora_rank == 0,
    }
    return [lever for lever, helps in found.items() if helps]


def _size(count: int) -> str:
    return bytes_text(count) if count else "-"


def capacity(target: Target) -> int:
    """Bytes that this process may use of the device."""
    if target.kind != "cuda":
        return target.memory_bytes
    return int(target.memory_bytes * torch.cuda.memory.get_per_process_memory_fraction(target.device))


def write_snapshot(given: Surroundings, error: BaseException) -> None:
    """What the allocator held, by size of block: logs/memory_snapshot.json."""
    try:
        segments = torch.cuda.memory_snapshot()
        blocks = Counter((block["size"], block["state"]) for segment in segments for block in segment["blocks"])
        largest = sorted(blocks, key=lambda block: -block[0] * blocks[block])[:100]
        summary = {
            "phase": given.recorder.current_phase,
            "step": given.recorder.current_step,
            "message": str(error),
            "allocated_bytes": sum(segment["allocated_size"] for segment in segments),
            "reserved_bytes": sum(segment["total_size"] for segment in segments),
            "blocks": [{"bytes": size, "state": state, "count": blocks[size, state]} for size, state in largest],
        }
        write_atomically(given.directory.logs / "memory_snapshot.json", json_text(summary, indent=2) + "\n")
    except Exception as problem:  # noqa: BLE001 -- the run is ending for another reason, which must be told
        given.recorder.event(f"no memory snapshot: {type(problem).__name__}: {problem}")
