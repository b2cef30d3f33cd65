"""What a run is given rather than makes: where it runs, where it writes, who else is there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ullage.base.communicator import Communicator, Solo
from ullage.base.units import bytes_text
from ullage.config.settle import plainly
from ullage.config.tree import Config
from ullage.engine.claim import claim
from ullage.engine.measure import MemoryProbe
from ullage.engine.parking import Ahead
from ullage.engine.replay import Replays
from ullage.model.target import Target, find_target
from ullage.planner.components import CONTEXT, SLACK
from ullage.run.planned import Planned
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.view import View
from ullage.telemetry.writer import MetricsWriter, SilentWriter
from ullage.trainer.stop import Stop

SETTLED = 2
"""Steps after which a process holds everything that stays: workspaces, captured graphs, the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Everything a rank holds before it assembles its part of the run."""

    config: Config
    planned: Planned
    directory: RunDirectory
    target: Target
    ranks: Communicator
    recorder: Recorder
    writer: MetricsWriter
    probe: MemoryProbe
    replays: Replays
    stop: Stop
    ahead: Ahead
    """Brings weights that wait in host memory before their phase begins."""
    closing: ExitStack
    """Closes what a run opens, when it ends."""


def without_a_run(config: Config, closing: ExitStack, views: Sequence[View] = ()) -> Surroundings:
    """Those of one process that leaves no trace: the folder is never made, the writer never writes."""
    directory = RunDirectory(Path(config.trainer.default_local_dir), "no-run")
    target, writer = find_target(config.trainer.device, 0), SilentWriter(directory)
    config = plainly(config, target.kind)
    probe = MemoryProbe(target)
    recorder = Recorder(writer, list(views), probe)
    closing.callback(recorder.stop)
    return Surroundings(
        config=config,
        planned=Planned(config=config),
        directory=directory,
        target=target,
        ranks=Solo(),
        recorder=recorder,
        writer=writer,
        probe=probe,
        replays=make_replays(config, recorder),
        stop=Stop(),
        ahead=make_ahead(target, Planned(config=config), recorder),
        closing=closing,
    )


def make_ahead(target: Target, planned: Planned, recorder: Recorder) -> Ahead:
    """On a GPU, with the room that the plan leaves beside each phase; a host that is the device gains nothing."""

    def room(phase: str) -> int:
        if target.kind == "cpu" or planned.capacity_bytes is None or phase not in planned.bytes:
            return 0
        return planned.capacity_bytes - CONTEXT - int((1 + SLACK) * planned.bytes[phase])

    ahead = Ahead(room)
    recorder.on_phase = ahead.enter
    return ahead


def claim_when_settled(target: Target, planned: Planned, recorder: Recorder, ranks: Communicator) -> None:
    """From its second step on a process holds what the plan counts on; where it cannot, it says so and goes on."""
    if not planned.bytes:
        return
    phase, most = max(planned.bytes.items(), key=lambda item: item[1])
    replay = planned.config.memory.replay
    then = "and phases that run out of it are repeated in smaller passes" if replay else "until a phase runs out of it"
    steps = count(1)

    def stepped() -> None:
        if (step := next(steps)) < SETTLED:
            return
        held = claim(target, most)
        for rank, there in enumerate(ranks.gather(held)) if step == SETTLED else [(ranks.rank, held)]:
            if not there:
                who = "" if rank == ranks.rank else f"rank {rank}: "
                sizes = f"{bytes_text(most)} of memory, not all of which can be had now"
                recorder.event(f"{who}{phase} was planned with {sizes}: the run goes on, {then}")
        if not held:
            recorder.on_step = lambda: None

    recorder.on_step = stepped


def make_replays(config: Config, recorder: Recorder, *, factor: int = 2) -> Replays:
    """What to do where memory runs out, as the config says."""
    return Replays(
        enabled=config.memory.replay,
        say=recorder.event,
        longest=config.data.max_prompt_length + config.data.max_response_length,
        factor=factor,
    )
