"""Faults on demand, for tests: `ULLAGE_FAULT="step=3,phase=update,kind=sigkill"` strikes as that phase begins."""

import os
import signal
from dataclasses import dataclass

VARIABLE = "ULLAGE_FAULT"
KINDS = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigint": signal.SIGINT}


@dataclass(slots=True)
class Fault:
    """A signal that this process sends to itself, once."""

    phase: str
    step: int
    kind: str
    rank: int
    struck: bool = False

    def strike(self, phase: str, step: int) -> None:
        if not self.struck and (phase, step) == (self.phase, self.step):
            self.struck = True
            os.kill(os.getpid(), KINDS[self.kind])


def asked_for(rank: int) -> Fault | None:
    """The fault that the environment asks for on this rank; rank 0 where it names none."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return None
    parts = dict(part.split("=", 1) for part in wanted.split(","))
    fault = Fault(parts["phase"], int(parts["step"]), parts["kind"], int(parts.get("rank", "0")))
    return fault if fault.rank == rank else None
