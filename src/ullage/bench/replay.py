"""A training whose passes are too large for its memory: it must finish by itself, in smaller ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ullage.base.faults import OUT_OF_MEMORY, Fault
from ullage.bench.clock import free
from ullage.bench.fit import Case, Training, capped
from ullage.bench.report import GIB
from ullage.model.target import Target

TOO_HIGH = 1.5
SLACK = 1.02
"""Room for the gaps between tensors, beyond what the tensors themselves need."""

CASES = {
    "cpu": Case(
        shape="tiny",
        cap_gib=None,
        settings={"memory.recompute": "none"},
        prompts=4,
        samples=4,
        prompt_tokens=8,
        response_tokens=8,
        micro_batch=48,
        slots=16,
    ),
    "cuda": Case(
        shape="0.5B",
        cap_gib=None,
        settings={"memory.recompute": "none"},
        prompt_tokens=512,
        response_tokens=256,
        micro_batch=5120,
    ),
}
"""On CUDA a pass holds two of the eight groups, a prompt and its samples each; one that is too large holds three."""


def replay(
    target: Target, *, steps: int = 5, say: Callable[[str], None] = lambda line: None
) -> Iterator[dict[str, Any]]:
    """Rows: passes that fit, whose peak becomes the cap; larger ones without a cap; the larger ones under it.

    A CPU has no cap, so there memory runs out where a fault says so.
    """
    fitting = CASES[target.kind]
    larger = dataclasses.replace(fitting, micro_batch=round(TOO_HIGH * fitting.micro_batch))
    yield (allowed := _trained("fits", fitting, target, steps))
    yield _trained("larger, no cap", larger, target, steps)
    cap = SLACK * allowed["peak_gib"] if target.kind == "cuda" else None
    fault = Fault(phase="update", step=2, kind=OUT_OF_MEMORY, at=2) if target.kind == "cpu" else None
    yield _trained("larger, capped", dataclasses.replace(larger, cap_gib=cap), target, steps, fault, say)


def _trained(
    name: str,
    case: Case,
    target: Target,
    steps: int,
    fault: Fault | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    free(target)  # what the training before held
    row: dict[str, Any] = {"training": name, "shape": case.shape, "cap_gib": case.cap_gib and round(case.cap_gib, 2)}
    peaks = [0]
    done = 0
    with capped(case.cap_gib, target):
        training = Training(case, target)
        if fault is not None:
            _mine(training, fault)
        try:
            for step in range(1, steps + 1):
                training.step(step)
                peaks += training.phases.peaks.values()
                done = step
        except torch.OutOfMemoryError as error:
            row["why"] = str(error).splitlines()[0]
    for line in training.lines:
        say(line)
    return row | {
        "steps": done,
        "finished": done == steps,
        "replays": len(training.lines),
        "budget_before": case.micro_batch,
        "budget_after": training.actor.limits.max_tokens,
        "peak_gib": round(max(peaks) / GIB, 2),
        "weights_finite": all(bool(p.isfinite().all()) for p in training.actor.model.module.parameters()),
    }


def _mine(training: Training, fault: Fault) -> None:
    """Every pass begins with the embedding of its tokens, which asks whether memory is to run out in it."""

    def hook(*_: object) -> None:
        if fault.runs_out(training.phases.current, training.current_step):
            raise torch.OutOfMemoryError("injected")

    training.actor.model.module.get_input_embeddings().register_forward_hook(hook)
