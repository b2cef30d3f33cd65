"""A planned peak, claimed while a run is young: its fullest micro-batch may come hours after its first.

What torch's allocator holds by then no other program can take, and where one already has, a run finds out early.
"""

from __future__ import annotations

from functools import cache

import torch

from ullage.model.target import Target
from ullage.planner.components import SLACK

MIB = 1 << 20
SMALL_BLOCKS = 64
"""Blocks of up to 1 MiB lie in pages of their own: there a pass that is shorter than all before puts what was in large
blocks. By a trace of sixty steps of 0.5B whose layers are recomputed, 36 at once."""


def claim(target: Target, planned: int) -> bool:
    """Let the allocator hold what `planned` allocated bytes take; False if they cannot be had any more.

    It holds them until its cache is emptied, as before steps are captured: asked again, it takes them again. Segments
    that do not grow are left alone: what is cut out of one large block later would keep it from being used whole again.
    """
    if target.kind != "cuda" or torch.cuda.memory_reserved(target.device) >= planned or not _segments_grow(target):
        return True
    missing = planned - torch.cuda.memory_allocated(target.device)
    torch.cuda.empty_cache()  # gaps would be held beside the whole of it
    small = min(SMALL_BLOCKS, int(SLACK / 2 * planned) // MIB)  # a plan leaves as much again for gaps
    return _take([MIB] * small + [missing], target.device) or _take([missing], target.device)


def _take(sizes: list[int], device: torch.device) -> bool:
    """All at once, and free again: the allocator keeps them."""
    try:
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    except torch.OutOfMemoryError:  # of the device, or of the share of it that this process may use
        return False
    del blocks
    return True


@cache
def _segments_grow(target: Target) -> bool:
    """By what the allocator does: not every device can do what the settings ask for."""
    if torch.cuda.get_allocator_backend() != "native":  # CUDA's own has neither segments nor snapshots
        return False
    return any(part["is_expandable"] for part in torch.cuda.memory_snapshot() if part["device"] == target.index)
