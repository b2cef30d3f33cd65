"""What a run is given rather than makes: where it runs, where it writes, who else is there."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from ullage.base.communicator import Communicator
from ullage.config.tree import Config
from ullage.engine.measure import MemoryProbe
from ullage.model.target import Target
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.stop import Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Everything a rank holds before it assembles its part of the run."""

    config: Config
    directory: RunDirectory
    target: Target
    ranks: Communicator
    recorder: Recorder
    writer: MetricsWriter
    probe: MemoryProbe
    stop: Stop
    closing: ExitStack
    """Closes what a run opens, when it ends."""
