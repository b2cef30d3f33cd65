"""Out-of-memory replay: a phase that runs out of memory is begun again, with half the tokens in a pass.

Advantages and loss denominators are fixed on a whole mini-batch before it is split, and a sample follows from its own
seed: smaller passes change the order of sums and nothing else. Nothing that is repeated may talk to other ranks, so a
rank repeats its part by itself while the others wait for it at the next collective.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from ullage.base.communicator import Communicator
from ullage.batch.pack import Limits

T = TypeVar("T")

# Memory that the caching allocator does not hand out: libraries' workspaces, and a CPU's own.
OTHER_MESSAGES = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less at once would have fitted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in OTHER_MESSAGES)


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of the work at hand, in tokens that are fed to a model."""

    longest: int
    """Of one sequence: no pass can be smaller."""
    total: int
    count: int
    """Sequences."""


def reduced(limits: Limits, extent: Extent, factor: int) -> Limits | None:
    """Limits under which the largest pass over this work holds that many times fewer; None: it cannot get smaller."""
    sequences = min(limits.max_sequences or extent.count, extent.count)
    tokens = min(limits.max_tokens, extent.total, sequences * extent.longest)
    fewer_tokens = max(extent.longest, tokens // factor)
    fewer_sequences = max(1, sequences // factor) if limits.max_sequences else None
    if factor > 1 and fewer_tokens >= tokens and (fewer_sequences is None or fewer_sequences >= sequences):
        return None
    return replace(limits, max_tokens=fewer_tokens, max_sequences=fewer_sequences) if factor > 1 else limits


@dataclass(slots=True)
class Replays:
    """What a run does about phases that run out of memory, and how often it had to."""

    enabled: bool = True
    say: Callable[[str], None] = lambda line: None
    """One line for the user."""
    longest: int = 0
    """Tokens of the longest sequence that the config allows: no budget in it may be smaller."""
    factor: int = 2
    """What a budget is divided by; 1 repeats a phase as it was."""
    _lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self._lines.append(line)
        self.say(line)

    def of_step(self, ranks: Communicator) -> dict[str, float]:
        """How often any rank had to since the last call, as a metric. What other ranks said is said here too."""
        lines, self._lines = self._lines, []
        everyone = ranks.gather(lines)
        for rank, theirs in enumerate(everyone):
            if rank != ranks.rank:
                for line in theirs:
                    self.say(f"rank {rank}: {line}")
        return {"memory/replays": float(sum(map(len, everyone)))}


class Replayer:
    """The limits of passes that belong together; they shrink where memory runs out, and stay so.

    Args:
        advice: the config key, with a value, that would start a run with the given limits; "" where there is none.
    """

    def __init__(
        self, limits: Limits, replays: Replays | None = None, *, advice: Callable[[Limits], str] = lambda limits: ""
    ) -> None:
        self.limits = limits
        self.advice = advice
        self._replays = replays or Replays()
        self._given = limits

    def fit(self, extent: Extent) -> Limits:
        """The limits, wide enough again for a sequence longer than those they shrank for."""
        least = min(extent.longest, self._given.max_tokens)
        if self.limits.max_tokens < least:
            self.limits = replace(self.limits, max_tokens=least)
        return self.limits

    def run(self, phase: str, extent: Extent, work: Callable[[], T]) -> T:
        """What `work` gives. It reads `limits`, and can be begun again at any time: the error tells when it must be."""
        self.fit(extent)
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                smaller = reduced(self.limits, extent, self._replays.factor) if self._replays.enabled else None
                if smaller is None or not is_out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold the activations of the pass that failed
            self._replays.add(self._line(phase, smaller))
            self.limits = smaller
            free()

    def _line(self, phase: str, after: Limits) -> str:
        before = self.limits
        sizes = f"{after.max_tokens} instead of {before.max_tokens} tokens"
        if before.max_sequences:
            sizes += f" and {after.max_sequences} instead of {before.max_sequences} sequences"
        settable = replace(after, max_tokens=max(after.max_tokens, self._replays.longest))
        is_less = settable.max_tokens < before.max_tokens or settable.max_sequences != before.max_sequences
        advice = self.advice(settable) if is_less else ""
        return f"{phase} ran out of memory: repeated, and from now on done, in passes of {sizes}" + (
            f"; to begin with that, set {advice}" if advice else ""
        )


def free() -> None:
    """Give memory that nobody holds back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
