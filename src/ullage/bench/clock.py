"""Time and peak memory of a piece of work on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ullage.model.target import Target


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: float
    """The median of the repetitions."""
    peak_bytes: int
    """The allocator's peak during them; 0 on a CPU."""


def synchronize(target: Target) -> None:
    if target.kind == "cuda":
        torch.cuda.synchronize(target.device)


def measure(work: Callable[[], object], target: Target, *, repeat: int = 3, warm_up: int = 1) -> Measured:
    """Run it a few times; the first ones, which compile and plan, do not count."""
    for _ in range(warm_up):
        work()
    synchronize(target)
    if target.kind == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        synchronize(target)
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(target.device) if target.kind == "cuda" else 0
    return Measured(sorted(times)[len(times) // 2], peak)


def free(target: Target) -> None:
    """Give back what nothing refers to any more, so that one measurement does not see the one before."""
    torch._dynamo.reset()
    gc.collect()
    if target.kind == "cuda":
        torch.cuda.empty_cache()
