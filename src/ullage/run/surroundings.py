"""What a run is given rather than makes: where it runs, where it writes, who else is there."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from ullage.base.communicator import Communicator
from ullage.config.tree import Config
from ullage.engine.measure import MemoryProbe
from ullage.engine.replay import Replays
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
    replays: Replays
    stop: Stop
    closing: ExitStack
    """Closes what a run opens, when it ends."""


def make_replays(config: Config, recorder: Recorder, *, factor: int = 2) -> Replays:
    """What to do where memory runs out, as the config says."""
    return Replays(
        enabled=config.memory.replay,
        say=recorder.event,
        longest=config.data.max_prompt_length + config.data.max_response_length,
        factor=factor,
    )
