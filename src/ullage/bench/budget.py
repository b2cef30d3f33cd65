"""A budget and nothing else: what the planner makes of it, and one whole step of that under the budget as a cap."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ullage.base.units import bytes_of
from ullage.bench.clock import free
from ullage.bench.fit import Phases, capped
from ullage.bench.report import GIB
from ullage.bench.shapes import shape_config
from ullage.config.load import load_mapping
from ullage.config.settle import PATHS, value_of
from ullage.model.target import Target
from ullage.planner.components import CONTEXT
from ullage.planner.hardware import Machine, find_gpu
from ullage.planner.model_shape import Shape
from ullage.run.machine import find_machine
from ullage.run.rehearsal import Rehearsal
from ullage.run.traced_plan import TracedPlan, stand_in_of, traced_plan

BUDGET = "24GiB"
SHAPES = ("0.5B", "1.5B", "3B", "7B")
SMALL = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 16,
    "data.max_response_length": 8,
}
"""What a CPU computes in seconds."""


def budgets(target: Target, shapes: Sequence[str] = SHAPES) -> Iterator[dict[str, Any]]:
    """Rows of full-parameter GRPO with every other key at its default."""
    for shape in shapes:
        free(target)
        with TemporaryDirectory() as folder:
            given = {"algorithm.name": "grpo", "memory.budget": BUDGET} | (SMALL if target.kind == "cpu" else {})
            made = planned(shape, target, folder, given)
            yield {"shape": shape, "budget": BUDGET} | _run(made, shape, target)


def planned(shape: str, target: Target, folder: str, given: Mapping[str, Any]) -> TracedPlan:
    """The plan of a config for a model whose folder is to be this one. A CPU plans for an H200."""
    fields = shape_config(shape).to_dict()
    Path(folder, "config.json").write_text(json.dumps(fields), encoding="utf-8")
    config = load_mapping({**given, "actor_rollout_ref.model.path": folder}).config
    known = Shape.from_config(fields, shape)
    if target.kind == "cuda":
        return traced_plan(known, config, find_machine(target, config, 1).machine, target, {})
    gpu = find_gpu("h200")
    return traced_plan(known, config, Machine(gpu=gpu, count=1, host_bytes=None), stand_in_of(gpu), {})


def _run(made: TracedPlan, shape: str, target: Target) -> dict[str, Any]:
    chosen, limit = made.plan.config, (bytes_of(BUDGET) or 0) - CONTEXT
    phases, why = Phases(target), None
    began = time.perf_counter()
    with capped(limit / GIB, target):
        try:
            Rehearsal(chosen, shape_config(shape), target, phases, every_phase=False).step()
        except torch.OutOfMemoryError as error:
            why = str(error).splitlines()[0]
    return {
        "fits": made.plan.fits and why is None,
        "why": why,
        "chosen": {name: value_of(chosen, path) for name, path in PATHS.items()},
        "planned_gib": {name: round(size / GIB, 2) for name, size in made.traced.phases.items()},
        "peak_gib": {name: round(size / GIB, 2) for name, size in phases.peaks.items()},
        "device_used_gib": round(phases.device_used / GIB, 2),
        "planned_step_s": round(made.plan.step_seconds, 2),
        "step_s": round(sum(value for name, value in phases.seconds.items() if name != "load"), 2),
        "seconds": {name: round(value, 2) for name, value in phases.seconds.items()},
        "total_s": round(time.perf_counter() - began, 1),
    }
