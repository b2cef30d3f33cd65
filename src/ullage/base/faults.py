"""Faults on demand, for tests: `ULLAGE_FAULT="step=3,phase=update,kind=sigkill"` strikes as that phase begins.

`kind=oom,at=2` strikes in the phase's second pass through a model: out of memory, again in each repetition up to
`times`, in the backward half of the pass with `half=backward`; `factor=1` has the phase repeated at its own budget.
Several faults have semicolons between them.
"""

import os
import signal
from dataclasses import dataclass

VARIABLE = "ULLAGE_FAULT"
KINDS = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigint": signal.SIGINT}
OUT_OF_MEMORY = "oom"


@dataclass(slots=True, kw_only=True)
class Fault:
    """A signal that this process sends to itself, once; or memory that runs out."""

    phase: str
    step: int
    kind: str
    rank: int = 0
    at: int = 1
    """In which pass of the phase memory runs out, counted anew after each time."""
    times: int = 1
    half: str = "forward"
    factor: int = 2
    """What a phase that ran out divides its budget by."""
    struck: int = 0
    passes: int = 0

    def strike(self, phase: str, step: int) -> None:
        """Called as a phase begins."""
        if self.kind in KINDS and not self.struck and (phase, step) == (self.phase, self.step):
            self.struck += 1
            os.kill(os.getpid(), KINDS[self.kind])

    def runs_out(self, phase: str | None, step: int) -> bool:
        """Called as a pass begins: whether it is to run out of memory."""
        if self.kind != OUT_OF_MEMORY or self.struck == self.times or (phase, step) != (self.phase, self.step):
            return False
        self.passes += 1
        if self.passes < self.at:
            return False
        self.struck, self.passes = self.struck + 1, 0
        return True


def asked_for(rank: int) -> list[Fault]:
    """The faults that the environment asks for on this rank; rank 0 where it names none."""
    wanted = os.environ.get(VARIABLE)
    return [fault for fault in map(_read, wanted.split(";")) if fault.rank == rank] if wanted else []


def _read(text: str) -> Fault:
    parts = dict(part.split("=", 1) for part in text.split(","))
    words = {name: parts.pop(name) for name in ("phase", "kind", "half") if name in parts}
    return Fault(**words, **{name: int(value) for name, value in parts.items()})  # type: ignore[arg-type]
