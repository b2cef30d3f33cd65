"""The update's speed and memory: tokens a second, utilisation, and what every memory lever saves and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.batch.pack import Limits
from ullage.bench.batches import PROMPT, log_normal_lengths, random_batch
from ullage.bench.clock import Measured, free, measure
from ullage.bench.report import GIB
from ullage.bench.shapes import shaped_model, training_flops
from ullage.config.load import load_mapping
from ullage.config.settle import plainly
from ullage.config.tree import Config
from ullage.engine.offload import SynchronizedGroupOffloadHandler
from ullage.model.target import Target
from ullage.run.levers import optimizer_levers, prepare_layers
from ullage.workers.actor import Actor

CURVE = (16_384, 32_768, 65_536, 98_304, 196_608)
"""Tokens of one optimizer step, for which the cost of a slower optimizer is told."""
PEAK_TFLOPS = 989.0
"""Dense bf16 of an H100 or H200, by its data sheet: what utilisation is measured against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one measured update consumes."""

    shape: str
    tokens: int
    """Of all sequences together."""
    micro_batch: int
    """Most tokens of one pass."""
    mean: int = 1024
    cap: int = 4096
    seed: int = 1


class Prepared(NamedTuple):
    """What one row measures."""

    actor: Actor
    passes: Callable[[], None]
    """Forward and backward over the workload's batch."""
    offload: SynchronizedGroupOffloadHandler | None


def prepared(workload: Workload, target: Target, settings: Mapping[str, Any]) -> Prepared:
    """An actor with these config keys, and its forward and backward passes over the workload's batch."""
    config = bench_config(workload, settings)
    model = shaped_model(workload.shape, target)
    offload = prepare_layers(model, config)
    algorithm = compose(config)
    lengths = lengths_of(workload)
    actor = Actor(
        model,
        config.actor_rollout_ref.actor,
        Limits(max_tokens=workload.micro_batch, share_prefix=False),
        Solo(),
        temperature=1.0,
        levers=optimizer_levers(config),
    )
    batch = random_batch(lengths, config, algorithm, seed=workload.seed)

    def passes() -> None:
        actor.optimizer.zero_grad()
        actor.backward(batch, algorithm)

    return Prepared(actor, passes, offload)


def bench_config(workload: Workload, settings: Mapping[str, Any]) -> Config:
    """A config with one prompt for each sequence and these keys."""
    given = {
        "algorithm.name": "reinforce_plus_plus",
        "data.train_batch_size": len(lengths_of(workload)),
        "data.max_prompt_length": workload.cap,
        "data.max_response_length": workload.cap,
        "actor_rollout_ref.rollout.n": 1,
    }
    return plainly(load_mapping({**given, **settings}).config, "cuda")


def lengths_of(workload: Workload) -> list[int]:
    return log_normal_lengths(workload.tokens, mean=workload.mean, cap=workload.cap, seed=workload.seed)


def speed(workload: Workload, target: Target, settings: Mapping[str, Any], *, repeat: int = 3) -> dict[str, Any]:
    """One row: forward and backward timed, the optimizer's step apart."""
    free(target)  # what the row before held
    actor, passes, offload = prepared(workload, target, settings)
    work = measure(passes, target, repeat=repeat)
    step = measure(lambda: actor.optimizer.step(1e-6, Solo()), target, repeat=2)
    lengths = lengths_of(workload)
    flops = training_flops(actor.model.module, lengths, sum(lengths) - PROMPT * len(lengths))
    memory = actor.optimizer.nbytes()
    found = row(workload, settings, lengths, work, step, flops)
    found["optimizer_gib"] = round(sum(memory.values()) / GIB, 2)
    if offload is not None:  # of the last micro-batch
        found["offloaded_percent"] = round(100 * offload.offloaded_bytes / max(offload.saved_bytes, 1), 1)
        found["offloaded_gib"] = round(offload.offloaded_bytes / GIB, 2)
    return found


def row(
    workload: Workload,
    settings: Mapping[str, Any],
    lengths: list[int],
    work: Measured,
    step: Measured,
    flops: float,
) -> dict[str, Any]:
    return {
        "shape": workload.shape,
        "settings": ", ".join(f"{key.split('.')[-1]}={value}" for key, value in settings.items()) or "defaults",
        "tokens": sum(lengths),
        "sequences": len(lengths),
        "micro_batch": workload.micro_batch,
        "update_s": round(work.seconds, 4),
        "tokens_per_s": round(sum(lengths) / work.seconds),
        "mfu_percent": round(100 * flops / work.seconds / (PEAK_TFLOPS * 1e12), 1),
        "optimizer_s": round(step.seconds, 4),
        "peak_gib": round(work.peak_bytes / GIB, 2),
        "step_peak_gib": round(step.peak_bytes / GIB, 2),
    }


def utilisation(target: Target, shapes: Mapping[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Rows for each shape, without and with compiled blocks; memory allowing, nothing is recomputed."""
    for shape, (tokens, micro_batch) in shapes.items():
        workload = Workload(shape=shape, tokens=tokens, micro_batch=micro_batch)
        for compiled in (False, True):
            settings = {
                "memory.recompute": "none",
                "memory.compile": compiled,
                "memory.optimizer_state": "streamed",  # not timed here, and room for activations
            }
            yield speed(workload, target, settings)


_NO_RECOMPUTE = {"memory.recompute": "none"}
_OPTIMIZER = "actor_rollout_ref.actor.optim.optimizer"
LEVERS: dict[str, dict[str, Any]] = {
    "none": _NO_RECOMPUTE,
    "compile": _NO_RECOMPUTE | {"memory.compile": True},
    "recompute full": {"memory.recompute": "full"},
    "recompute half": {"memory.recompute": 0.5},
    "recompute matmuls": {"memory.recompute": "matmuls"},
    "offload async 1/4": _NO_RECOMPUTE | {"memory.activation_offload": "async", "memory.activation_share": 0.25},
    "stochastic rounding": _NO_RECOMPUTE | {"memory.rounding": "stochastic"},
    "8-bit moments": _NO_RECOMPUTE | {_OPTIMIZER: "adamw_8bit"},
    "sgd": _NO_RECOMPUTE | {_OPTIMIZER: "sgd"},
    "state streamed": _NO_RECOMPUTE | {"memory.optimizer_state": "streamed"},
    "state on host": _NO_RECOMPUTE | {"memory.optimizer_state": "host"},
    "gradients float32": _NO_RECOMPUTE | {"memory.gradients": "float32"},
    "gradients on host": _NO_RECOMPUTE | {"memory.gradients": "host"},
}
"""Every lever alone, beside an update without any."""

STATE: dict[str, dict[str, Any]] = {
    "device": {"memory.recompute": "full"},
    "streamed": {"memory.recompute": "full", "memory.optimizer_state": "streamed"},
    "host": {"memory.recompute": "full", "memory.optimizer_state": "host"},
    "8-bit, rounded, streamed": {
        "memory.recompute": "full",
        "memory.optimizer_state": "streamed",
        "memory.rounding": "stochastic",
        _OPTIMIZER: "adamw_8bit",
    },
}
"""Where optimizer state lives."""

_STATELESS = {_OPTIMIZER: "sgd", "memory.rounding": "stochastic", "memory.compile": True}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "kept": _STATELESS | _NO_RECOMPUTE,
    **{
        f"{kind} {share:.0%}": _STATELESS
        | _NO_RECOMPUTE
        | {"memory.activation_offload": kind, "memory.activation_share": share}
        for kind, share in (("async", 0.2), ("async", 0.36), ("async", 0.4), ("async", 0.6), ("sync", 0.4))
    },
    "recompute half": _STATELESS | {"memory.recompute": 0.5},
    "recompute": _STATELESS | {"memory.recompute": "full"},
    "recompute, sync": _STATELESS | {"memory.recompute": "full", "memory.activation_offload": "sync"},
    "recompute, async": _STATELESS | {"memory.recompute": "full", "memory.activation_offload": "async"},
}
"""What becomes of activations; an optimizer without state leaves room for all of them."""


def levers(workload: Workload, target: Target, table: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Bytes saved and time lost by each row of a table of settings, against its first."""
    first: dict[str, Any] | None = None
    for name, settings in table.items():
        try:
            found = speed(workload, target, settings, repeat=2)
        except torch.OutOfMemoryError:
            found = {"shape": workload.shape, "update_s": None, "peak_gib": None}
        first = first or found
        yield compared({"lever": name} | found, first)


def compared(found: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """A row with what it saves and costs against another."""
    if found["update_s"] is None or first["update_s"] is None:
        return found
    whole, before = (row["update_s"] + row["optimizer_s"] for row in (found, first))
    longer = {
        tokens: [row["update_s"] * tokens / row["tokens"] + row["optimizer_s"] for row in (found, first)]
        for tokens in CURVE
    }
    return found | {
        "saved_gib": round(
            max(first["peak_gib"], first["step_peak_gib"]) - max(found["peak_gib"], found["step_peak_gib"]), 2
        ),
        "time_lost_percent": round(100 * (whole / before - 1), 1),
        "time_lost_percent_at": {
            tokens: round(100 * (here / there - 1), 1) for tokens, (here, there) in longer.items()
        },
    }
