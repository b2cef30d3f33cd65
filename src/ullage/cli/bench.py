"""`ullage bench`: measure this program on this machine, and write down what was found."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.model.target import Target

HELP = "measure speed and memory on this machine"
PARTS = ("speed", "head", "levers", "state", "activations", "fit")
RESULTS = Path("benchmarks/results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["update"], help="update: the training step, its memory levers and its head")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="models: 0.5B 1.5B 3B 7B 8B 14B 32B, or tiny")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="of fit: 3B 8B 14B 32B '7B QLoRA' '32B LoRA'")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes; default: benchmarks/results")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    del overrides
    from ullage.bench import report
    from ullage.model.target import find_target

    target = find_target("auto", 0)
    out = arguments.out or RESULTS / f"update_{target.kind}.json"
    found: dict[str, Any] = {}
    command = "ullage bench update --only " + " ".join(arguments.only)
    for part in arguments.only:
        found[part] = measured(part, target, arguments)
        report.write(out, target, command, found)  # after each part, so that nothing measured is lost
        print(f"{part}\n{report.table(found[part])}\n", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps(found))
    print(f"written: {out}", file=sys.stderr)
    return 0


def measured(part: str, target: Target, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one part. A CPU gets the same code on a tiny model: a check that it runs, not a measurement."""
    from ullage.bench import fit, head, update

    small = target.kind == "cpu"
    if part == "speed":
        sizes = {"0.5B": (32768, 32768), "1.5B": (32768, 32768), "7B": (16384, 16384)}
        shapes = arguments.shapes or (["tiny"] if small else list(sizes))
        return update.utilisation(target, {shape: sizes.get(shape, (4096, 4096)) for shape in shapes})
    if part == "head":
        if small:
            return head.heads(target, tokens=256, vocabulary=2048, hidden_sizes=(64,))
        return head.heads(target, tokens=16384, vocabulary=152064, hidden_sizes=(896, 1536, 3584))
    if part != "fit":
        tables = {"levers": update.LEVERS, "state": update.STATE, "activations": update.ACTIVATIONS}
        shape = "tiny" if small else "3B" if part == "levers" else "7B"
        workload = update.Workload(shape=shape, tokens=4096 if small else 16384, micro_batch=4096 if small else 8192)
        return update.levers(workload, target, tables[part])
    return [fit.fit(case, target) for case in arguments.cases or (["tiny"] if small else fit.CASES)]
