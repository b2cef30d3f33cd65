"""Many steps in a row: whether anything grows that should not, on the device or on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import psutil
import torch

from ullage.bench.clock import free, synchronize
from ullage.bench.fit import Case, Training
from ullage.bench.shapes import shape_config
from ullage.engine.claim import claim
from ullage.model.target import Target
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout

MIB = 1 << 20
SETTLED = (2, 10)
"""Steps after which nothing should grow any more."""

CASES = {
    "cpu": Case(
        shape="tiny",
        cap_gib=None,
        settings={"memory.recompute": "none"},
        prompts=4,
        samples=4,
        prompt_tokens=8,
        response_tokens=8,
        micro_batch=64,
        slots=16,
        ends_every=8,
    ),
    "cuda": Case(
        shape="0.5B",
        cap_gib=None,
        settings={"memory.recompute": "full"},
        samples=4,
        prompt_tokens=64,
        response_tokens=48,
        micro_batch=1024,
        slots=32,
        ends_every=32,
    ),
}


class Held(NamedTuple):
    """Bytes between two steps."""

    allocated: int
    reserved: int
    host: int
    peak: int
    """The most that was allocated in any step so far: a fuller pass than all before needs more, and what it had stays
    reserved."""


def endurance(
    target: Target, *, steps: int = 200, every: int = 50, say: Callable[[str], None] = lambda line: None
) -> Iterator[dict[str, Any]]:
    """A row after every so many steps and after the last, each about all steps until then."""
    free(target)
    training = Training(CASES[target.kind], target)
    planned = planned_peak(training)
    history: list[Held] = []
    lengths: list[int] = []
    for step in range(1, steps + 1):
        lengths += [len(sample.token_ids) for sample in training.step(step)]
        if step >= SETTLED[0] and not claim(target, planned):  # as a run does
            say(f"step {step}: the device does not have the {planned / MIB:.1f} MiB that were planned")
        history.append(held(target, max(training.phases.peaks.values())))
        if step % every == 0 or step == steps:
            counts = {"shape": training.case.shape, "samples": len(lengths), "replays": len(training.lines)}
            spread = {"shortest": min(lengths), "longest": max(lengths)}
            yield counts | spread | {"planned_mib": round(planned / MIB, 2)} | summary(history)
        elif step <= SETTLED[-1] or step % 10 == 0:
            say(f"step {step}: " + ", ".join(f"{k} {v / MIB:.1f} MiB" for k, v in history[-1]._asdict().items()))


def planned_peak(training: Training) -> int:
    """Bytes that the fullest micro-batch has allocated, by closed forms."""
    shape = Shape.from_config(shape_config(training.case.shape).to_dict())
    return max(phase.allocated_bytes for phase in Layout(shape, training.config).phases())


def held(target: Target, peak: int) -> Held:
    """What is held now, garbage that Python has yet to collect included: nobody collects it in a run either."""
    synchronize(target)
    host = int(psutil.Process().memory_info().rss)
    if target.kind != "cuda":
        return Held(0, 0, host, peak)
    return Held(torch.cuda.memory_allocated(target.device), torch.cuda.memory_reserved(target.device), host, peak)


def summary(history: Sequence[Held]) -> dict[str, Any]:
    """Of each kind of memory, in MiB: the last value, the highest, and how much more the last is than an early one."""
    row: dict[str, Any] = {"steps": len(history)}
    for kind in Held._fields:
        values = [getattr(held, kind) for held in history]
        found = {"last": values[-1], "highest": max(values)}
        for step in SETTLED:
            if len(values) > step:
                found[f"growth_after_{step}"] = values[-1] - values[step - 1]
        row[f"{kind}_mib"] = {name: round(value / MIB, 2) for name, value in found.items()}
    return row
