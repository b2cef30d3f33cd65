"""One rank of a run, from its directory to its exit code. Every rank of a run executes this."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ullage.base.communicator import Communicator
from ullage.base.errors import UllageError
from ullage.config.load import load_config
from ullage.config.tree import Config
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.sinks import make_sinks
from ullage.telemetry.view import make_view
from ullage.telemetry.writer import MetricsWriter, SilentWriter
from ullage.trainer.stop import Stop


def run_rank(directory: RunDirectory) -> int:
    """Train; whatever happens, exit.json says how it ended. Expected failures are raised again for the caller."""
    stop = Stop()
    stop.install()  # before torch is imported: a signal during the imports must not be lost
    import torch

    from ullage.engine import parallel
    from ullage.engine.measure import MemoryProbe
    from ullage.model.target import find_target
    from ullage.run.assemble import Surroundings, assemble
    from ullage.run.launch import newest_checkpoint

    config = load_config(directory.resolved).config
    target = find_target(config.trainer.device, int(os.environ.get("LOCAL_RANK", "0")))
    if target.kind == "cuda":
        torch.cuda.set_device(target.device)
    ranks = parallel.join(target.device)
    torch.manual_seed(config.trainer.seed)
    writer = MetricsWriter(directory) if ranks.rank == 0 else SilentWriter(directory)
    probe = MemoryProbe(target)
    recorder = Recorder(writer, [], probe)
    add_views(recorder, config, directory, ranks)
    checkpoint, warnings = newest_checkpoint(directory)
    code, reason = 1, "internal error"
    try:
        for warning in warnings:
            recorder.event(warning)
        trainer = assemble(
            Surroundings(
                config=config,
                directory=directory,
                target=target,
                ranks=ranks,
                recorder=recorder,
                writer=writer,
                probe=probe,
                stop=stop,
            ),
            checkpoint,
        )
        writer.truncate_after(trainer.keeper.step if checkpoint else -1)
        trainer.train()
        code, reason = 0, "finished"
    except UllageError as error:
        code, reason = error.code, error.cause
        raise
    finally:
        recorder.stop()
        resume = None if code == 0 else f"ullage resume {directory.path}"
        writer.exit(code, reason, recorder.current_phase, recorder.current_step, resume)
        parallel.leave()
    return code


def add_views(recorder: Recorder, config: Config, directory: RunDirectory, ranks: Communicator) -> None:
    """Rank 0 shows the run to people and to the loggers that were asked for."""
    if ranks.rank != 0:
        return
    if "console" in config.trainer.logger:
        recorder.add_view(make_view())
    for sink in make_sinks(config.trainer.logger, directory, config.trainer.project_name, recorder.event):
        recorder.add_view(sink)


def main() -> int:
    from ullage.cli.errors_text import report

    directory = RunDirectory.open_existing(Path(sys.argv[1]))
    try:
        return run_rank(directory)
    except UllageError as error:
        quiet = os.environ.get("RANK", "0") != "0" and error.cause.startswith("rank ")
        return error.code if quiet else report(error, as_json=False)


if __name__ == "__main__":
    sys.exit(main())
