"""`ullage export`: the weights of a run as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ullage.base.errors import UsageError, WriteError

HELP = "write a run's weights as a Hugging Face folder, or its adapter as a PEFT folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run (or a checkpoint, a model folder, a GGUF file)")
    parser.add_argument("out", type=Path, help="the folder to write; never overwrites")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step, not the newest weights")
    which.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="convert; default: as they were trained")
    parser.add_argument("--adapter", action="store_true", help="the adapter alone, as a PEFT folder, not merged")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    del overrides
    if os.path.lexists(arguments.out):  # before anything slow is done
        raise WriteError(f"{arguments.out} already exists", "give another name, or remove it first")
    if arguments.adapter and arguments.dtype:
        raise UsageError("--adapter and --dtype: an adapter is written as it was trained", "leave one of them out")
    from ullage.run.export import export_adapter, export_model
    from ullage.run.locate import best_weights, locate, open_run, weights_of_step

    if arguments.step is not None:
        found = weights_of_step(open_run(arguments.run), arguments.step)
    elif arguments.best:
        found = best_weights(open_run(arguments.run))
    else:
        found = locate(arguments.run)
    for warning in found.warnings:
        print(warning, file=sys.stderr)
    if arguments.dtype is None and not Path(found.weights).exists():
        raise UsageError(f"no run or model {arguments.run}", "`ullage ls` lists the runs")
    step = "" if found.step is None else f", step {found.step}"
    print(f"exporting {found.weights}{step}", file=sys.stderr)
    if arguments.adapter:
        export_adapter(found.weights, arguments.out)
    else:
        export_model(found.weights, arguments.out, dtype=arguments.dtype)
    if arguments.json:
        print(json.dumps({"out": str(arguments.out), "from": found.weights, "step": found.step}))
    else:
        print(f"wrote {arguments.out}", file=sys.stderr)
    return 0
