"""Measured memory: the peak of a phase, what the registered owners hold of it, and what the phase itself took."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import torch

from ullage.model.target import Target


class MemoryProbe:
    """Peaks per phase. On CUDA the allocator's own; on a CPU the process's resident high-water mark, where it can be
    reset (Linux), else the resident size at the phase's end."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.owners: dict[str, int] = {}
        if target.kind != "cuda":  # there the allocator counts tensors alone
            self.owners["context"] = int(psutil.Process().memory_info().rss)
        self.highest: dict[str, int] = {}
        """Bytes by component in the phase that took the most so far."""

    def register(self, component: str, nbytes: int) -> None:
        """A persistent owner of memory, under one of the component names of the memory report."""
        self.owners[component] = nbytes

    def start_phase(self) -> None:
        if self.target.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the current resident size

    def end_phase(self) -> tuple[int, int, dict[str, int]]:
        """(allocated peak, reserved peak, bytes by component); what no owner holds is the phase's own `activations`."""
        if self.target.kind == "cuda":
            device = self.target.device
            allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        else:
            allocated = reserved = _resident_peak()
        components = {**self.owners, "activations": max(0, allocated - sum(self.owners.values()))}
        if sum(components.values()) >= sum(self.highest.values()):
            self.highest = components
        return allocated, reserved, components


def _resident_peak() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return int(psutil.Process().memory_info().rss)
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
