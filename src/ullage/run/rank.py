"""One rank of a run, from its directory to its exit code. Every rank of a run executes this."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.base import faults
from ullage.base.allocator import expand_segments
from ullage.base.communicator import Solo
from ullage.base.errors import InterruptedRunError, PeerLostError, PreemptedError, UllageError
from ullage.config.load import load_config
from ullage.config.tree import Config
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.sinks import make_sinks
from ullage.telemetry.view import make_view
from ullage.telemetry.writer import MetricsWriter, SilentWriter
from ullage.trainer.stop import Stop

if TYPE_CHECKING:
    from ullage.engine.measure import MemoryProbe
    from ullage.run.surroundings import Surroundings

STDIN, STDOUT, STDERR = 0, 1, 2


def run_rank(directory: RunDirectory, stop: Stop, *, rank: int = 0, size: int = 1) -> int:
    """Train; whatever happens, exit.json says how it ended. Failures are raised again for the caller."""
    writer = MetricsWriter(directory) if rank == 0 else SilentWriter(directory)
    recorder: Recorder | None = None
    code, reason = 1, "internal error"
    try:
        with ExitStack() as closing:
            given = surroundings(directory, stop, writer, closing, rank, size)
            recorder = given.recorder
            train(given)
        code, reason = 0, "finished"
    except UllageError as error:
        code, reason = error.code, error.cause
        raise
    except Exception as error:
        reason = f"internal error: {type(error).__name__}: {error}"
        raise
    finally:
        phase, step = (recorder.current_phase, recorder.current_step) if recorder else (None, 0)
        if code in (PreemptedError.code, InterruptedRunError.code):
            phase = stop.phase
        writer.exit(code, reason, phase, step, None if code == 0 else f"ullage resume {directory.path}")
    return code


def surroundings(
    directory: RunDirectory, stop: Stop, writer: MetricsWriter, closing: ExitStack, rank: int, size: int
) -> Surroundings:
    """Find the device and the peers; what is opened here, `closing` closes."""
    expand_segments()
    import torch

    from ullage.engine import parallel
    from ullage.engine.measure import MemoryProbe
    from ullage.model.target import find_target
    from ullage.run.comparison import compare
    from ullage.run.machine import enforce_budget
    from ullage.run.planning import plan_together
    from ullage.run.surroundings import Surroundings, claim_when_settled, make_ahead, make_replays

    config = load_config(directory.resolved).config
    target = find_target(config.trainer.device, rank)
    if target.kind == "cuda":
        torch.cuda.set_device(target.device)
    # Not by the environment: a run with one rank inside another program's job must not wait for that job's ranks.
    ranks = parallel.join(target.device) if size > 1 else Solo()
    closing.callback(parallel.leave)
    probe = MemoryProbe(target)
    mined = faults.asked_for(rank)
    recorder = FaultyRecorder(writer, probe, mined) if mined else Recorder(writer, [], probe)
    closing.callback(recorder.stop)
    if rank == 0:
        add_views(recorder, config, directory)
        if target.kind == "cuda" and not directory.plan.exists():
            recorder.event("planning: the phases of the run are traced, which takes a few seconds")
    planned = plan_together(config, directory, target, ranks)
    config = planned.config
    enforce_budget(target, config)
    torch.manual_seed(config.trainer.seed)
    recorder.planned = planned.bytes
    ahead = make_ahead(target, planned, recorder)
    claim_when_settled(target, planned, recorder, ranks)
    if rank == 0:
        closing.callback(compare, planned, recorder, directory, target, ahead.brought)
    stop.current_phase = lambda: recorder.current_phase
    return Surroundings(
        config=config,
        planned=planned,
        directory=directory,
        target=target,
        ranks=ranks,
        recorder=recorder,
        writer=writer,
        probe=probe,
        replays=make_replays(config, recorder, factor=mined[0].factor if mined else 2),
        stop=stop,
        ahead=ahead,
        closing=closing,
    )


def train(given: Surroundings) -> None:
    """Assemble and train. Nothing up to the first step is collective, so what fails there on one rank is shared."""
    from ullage.run.assemble import assemble
    from ullage.run.fit import fitting
    from ullage.run.launch import newest_checkpoint

    error: UllageError | None = None
    try:
        checkpoint, warnings = newest_checkpoint(given.directory)
        for warning in warnings:
            given.recorder.event(warning)
        with fitting(given):
            trainer = assemble(given, checkpoint)
        given.writer.truncate_after(trainer.keeper.recorded_until)
    except UllageError as problem:
        error = problem
    given.ranks.raise_together(error)
    with fitting(given):
        trainer.train()


class FaultyRecorder(Recorder):
    """A recorder whose phases a test has mined."""

    def __init__(self, writer: MetricsWriter, probe: MemoryProbe, mined: list[faults.Fault]) -> None:
        super().__init__(writer, [], probe)
        self._mined = mined
        if any(fault.kind == faults.OUT_OF_MEMORY for fault in mined):
            self._mine_passes()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name):
            for fault in self._mined:
                fault.strike(name, self.current_step)
            yield

    def _mine_passes(self) -> None:
        """Every pass through a model, of whatever role, asks whether it is the one."""
        from torch import OutOfMemoryError, Tensor, nn
        from torch.nn.modules.module import register_module_forward_hook

        def run_out(*_: object) -> None:
            raise OutOfMemoryError("injected by a test")

        def hook(module: nn.Module, given: object, out: Tensor) -> None:
            if not isinstance(module, nn.Embedding):  # of its tokens: where a pass begins, and its backward half ends
                return
            for fault in self._mined:
                if fault.runs_out(self.current_phase, self.current_step):
                    run_out() if fault.half == "forward" else out.register_hook(run_out)

        register_module_forward_hook(hook)


def add_views(recorder: Recorder, config: Config, directory: RunDirectory) -> None:
    """Rank 0 shows the run to people and to the loggers that were asked for."""
    if "console" in config.trainer.logger:
        recorder.add_view(make_view())
    for sink in make_sinks(config.trainer.logger, directory, config.trainer.project_name, recorder.event):
        recorder.add_view(sink)


def main() -> int:
    """A rank in a process of its own: its last word goes to the launcher, which tells the user once for all ranks."""
    last_word = os.fdopen(os.dup(STDOUT), "w", encoding="utf-8")
    os.dup2(STDERR, STDOUT)  # what a library prints must not meet it
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    directory = RunDirectory.open_existing(Path(sys.argv[1]))
    with last_word, Stop(patient=True).installed() as stop:
        try:
            return run_rank(directory, stop, rank=rank, size=size)
        except UllageError as error:
            word = {"kind": type(error).__name__, "cause": error.cause, "remedy": error.remedy}
            code = error.code
        except Exception as error:  # noqa: BLE001 -- the last line of defence: one line for the user, the rest in the log
            log = directory.logs / f"rank_{rank}.log"
            with log.open("a", encoding="utf-8") as file:
                file.write(traceback.format_exc())
            cause = f"rank {rank}: internal error: {type(error).__name__}: {error}"
            word = {"kind": UllageError.__name__, "cause": cause, "remedy": f"the traceback is in {log}"}
            code = UllageError.code
        json.dump(word, last_word)
    return code


def _end_with_launcher() -> None:
    """Without the launcher nobody holds the run's lock: this process must not go on writing."""
    while os.read(STDIN, 1):
        pass
    os._exit(PeerLostError.code)


if __name__ == "__main__":
    sys.exit(main())
