"""Faults on demand, for tests: `ULLAGE_FAULT="step=3,phase=update,kind=sigkill"` strikes once at that point."""

import os
import signal

KINDS = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM, "sigint": signal.SIGINT}


def strike(phase: str, step: int) -> None:
    """Send this process the signal that the environment asks for at this phase and step."""
    wanted = os.environ.get("ULLAGE_FAULT")
    if not wanted:
        return
    fault = dict(part.split("=", 1) for part in wanted.split(","))
    if fault.get("rank", os.environ.get("RANK", "0")) != os.environ.get("RANK", "0"):
        return
    if fault["phase"] == phase and int(fault["step"]) == step:
        os.kill(os.getpid(), KINDS[fault["kind"]])
