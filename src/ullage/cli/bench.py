"""`ullage bench`: measure this program on this machine, and write down what was found."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.base.errors import UllageError, UsageError

if TYPE_CHECKING:
    from ullage.model.target import Target

HELP = "measure speed and memory on this machine"
PARTS = ("speed", "peers", "head", "levers", "state", "activations", "fit", "budget", "endurance", "replay")
ROLLOUT_PARTS = ("batch", "ragged", "groups", "adapters", "company", "tiny")
MEMORY_PARTS = ("predict", "measure", "caps")
RESULTS = Path("benchmarks/results")
SIZES = {"0.5B": (32768, 32768), "1.5B": (32768, 32768), "7B": (16384, 16384)}
"""Tokens of an update and of one pass, by shape."""
SMALL = (4096, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    update = _what(subjects, "update", "the training step, its memory levers and its head")
    update.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    update.add_argument("--shapes", nargs="+", metavar="SHAPE", help="models: 0.5B 1.5B 3B 7B 8B 14B 32B, or tiny")
    update.add_argument(
        "--cases", nargs="+", metavar="CASE", help="of fit: 3B 8B 14B 32B '7B QLoRA' '32B LoRA'; of levers: their names"
    )
    rollout = _what(subjects, "rollout", "the rollout engine beside Hugging Face's generate and the roofline")
    rollout.add_argument(
        "--only", nargs="+", choices=ROLLOUT_PARTS, metavar="PART", help=f"{', '.join(ROLLOUT_PARTS)}; default: all"
    )
    rollout.add_argument("--shapes", nargs="+", metavar="SHAPE", help="only these models of a part")
    step = _what(subjects, "step", "whole GRPO steps, beside TRL's where it is installed")
    step.add_argument("--shapes", nargs="+", metavar="SHAPE", help="models: 0.5B 1.5B 7B, or tiny")
    step.add_argument("--recipes", nargs="+", metavar="RECIPE", help='"float32 master", "all bf16"; both by default')
    memory = _what(subjects, "memory", "the planner: random configs, predicted, then measured, then run under caps")
    memory.add_argument("--configs", type=_count, metavar="N", help="how many; default: 60, without a GPU 3")
    memory.add_argument(
        "--caps", type=_count, metavar="N", help="how many of them under caps; default: 20, without a GPU 1"
    )
    memory.add_argument("--seed", type=int, help="of the draw; default: 1")
    memory.add_argument("--gpu", metavar="GPU", help="predict for this GPU where there is none, such as h200")
    memory.add_argument("--only", choices=MEMORY_PARTS, metavar="PART", help=", ".join(MEMORY_PARTS))
    memory.add_argument("--workers", type=_count, default=1, metavar="N", help="measure so many at once; default: 1")
    memory.add_argument("--limit-seconds", type=float, metavar="S", help="stop by then; the same command goes on")


def _what(
    subjects: argparse._SubParsersAction[argparse.ArgumentParser], name: str, told: str
) -> argparse.ArgumentParser:
    parser = subjects.add_parser(name, help=told, description=told, allow_abbrev=False)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes; default: benchmarks/results")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    del overrides
    subjects = {"memory": _memory, "rollout": _rollout, "step": _step, "update": _update}
    return subjects[arguments.what](arguments)


def _update(arguments: argparse.Namespace) -> int:
    from ullage.model.target import find_target

    target = find_target("auto", 0)
    command = "ullage bench update --only " + " ".join(arguments.only)
    parts = {part: measured(part, target, arguments) for part in arguments.only}
    return _collected(parts, arguments.out or RESULTS / f"update_{target.kind}.json", target, command, arguments)


def _rollout(arguments: argparse.Namespace) -> int:
    from ullage.bench import company, rollout
    from ullage.model.target import find_target

    target = find_target("auto", 0)
    small = target.kind == "cpu"
    wanted = arguments.only or (["tiny", "company"] if small else [part for part in ROLLOUT_PARTS if part != "tiny"])

    def rows(part: str) -> Iterator[dict[str, Any]]:
        if part == "company":
            yield from company.company(target, "tiny" if small else "Qwen3-0.6B", response=8 if small else 256)
            return
        for work in rollout.WORKLOADS[part]():
            if arguments.shapes is None or work.shape in arguments.shapes:
                yield from rollout.measured(work, target, say)

    command = "ullage bench rollout --only " + " ".join(wanted)
    out = arguments.out or RESULTS / f"rollout_{target.kind}.json"
    return _collected({part: rows(part) for part in wanted}, out, target, command, arguments)


def _step(arguments: argparse.Namespace) -> int:
    from ullage.bench.step import RACES, RECIPES, step
    from ullage.model.target import find_target

    target = find_target("auto", 0)
    shapes = arguments.shapes or (["tiny"] if target.kind == "cpu" else ["0.5B", "1.5B", "7B"])
    for shape in shapes:
        if shape not in RACES:
            raise UsageError(f"no shape {shape}", f"one of: {', '.join(RACES)}")
    recipes = arguments.recipes or list(RECIPES)
    for recipe in recipes:
        if recipe not in RECIPES:
            raise UsageError(f"no recipe {recipe}", f"one of: {', '.join(RECIPES)}")
    rows = chain.from_iterable(step(RACES[shape], recipe, target, say) for shape in shapes for recipe in recipes)
    command = shlex.join(["ullage", "bench", "step", "--shapes", *shapes, "--recipes", *recipes])
    return _collected({"step": rows}, arguments.out or RESULTS / f"step_{target.kind}.json", target, command, arguments)


def _collected(
    parts: Mapping[str, Iterable[dict[str, Any]]],
    out: Path,
    target: Target,
    command: str,
    arguments: argparse.Namespace,
) -> int:
    """Measure part by part; written down after each row, so that nothing measured is lost."""
    from ullage.bench import report

    found: dict[str, list[dict[str, Any]]] = {}
    for part, rows in parts.items():
        found[part] = []
        for row in rows:
            found[part].append(row)
            report.write(out, target, command, found)
            say(f"{part}: {json.dumps(row)}")
        say(f"{part}\n{report.table(found[part])}\n")
    if arguments.json:
        print(json.dumps(found))
    say(f"written: {out}")
    return 0


def _memory(arguments: argparse.Namespace) -> int:
    from ullage.bench import memory, memory_table, report
    from ullage.model.target import find_target

    began, limit = time.monotonic(), arguments.limit_seconds
    target = find_target("auto", 0)
    out = arguments.out or RESULTS / f"memory_{memory.short_name(target, arguments.gpu)}.json"
    lines = out.with_suffix(".jsonl")
    bench = memory.start(lines, target, count=arguments.configs, seed=arguments.seed, gpu=arguments.gpu)
    bench.say, bench.workers = say, arguments.workers
    if limit is not None:
        bench.seconds_left = lambda: limit - (time.monotonic() - began)
    caps = arguments.caps or (1 if memory.is_small(target, arguments.gpu) else 20)
    say(f"{len(bench.configs)} configs of {lines}, about {bench.estimate(caps):.0f} s to measure on an H200")
    parts: dict[str, Callable[[], bool]] = {
        "predict": bench.predict,
        "measure": lambda: bench.measure(target),
        "caps": lambda: bench.caps(target, caps),
    }
    finished = all(parts[part]() for part in MEMORY_PARTS if arguments.only in (None, part))
    found = memory_table.summary(bench.records.rows, bench.gpu.memory_bytes)
    if found["rows"]:
        command = f"ullage bench memory --seed {bench.seed} --configs {len(bench.configs)} --caps {caps}"
        report.write(out, target, command, found)
        say(f"written: {out}")
    tables = [f"{title}\n{report.table(rows)}\n" for title, rows in memory_table.tables(found).items() if rows]
    print(json.dumps(found) if arguments.json else "\n".join(tables))
    if not finished:
        say("stopped by --limit-seconds; the same command goes on")
    if bench.failures:
        raise UllageError("\n".join(bench.failures), "the same command tries these again, and parts before them first")
    return 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measured(part: str, target: Target, arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """The rows of one part. A CPU gets the same code on a tiny model: a check that it runs, not a measurement."""
    from ullage.bench import budget, endurance, fit, head, peers, replay, update

    small = target.kind == "cpu"
    if part in ("speed", "peers"):
        shapes = arguments.shapes or (["tiny"] if small else list(SIZES))
        if part == "speed":
            return update.utilisation(target, {shape: SIZES.get(shape, SMALL) for shape in shapes})
        sizes = [(shape, *SIZES.get(shape, SMALL)) for shape in shapes]
        workloads = [update.Workload(shape=shape, tokens=tokens, micro_batch=most) for shape, tokens, most in sizes]
        return chain.from_iterable(peers.peers(workload, target, say=say) for workload in workloads)
    if part == "budget":
        return budget.budgets(target, arguments.shapes or (["tiny"] if small else budget.SHAPES))
    if part == "endurance":
        return endurance.endurance(target, steps=20 if small else 200, say=say)
    if part == "replay":
        return replay.replay(target, steps=3 if small else 5, say=say)
    if part == "head":
        if small:
            return head.heads(target, tokens=256, vocabulary=2048, hidden_sizes=(64,))
        return head.heads(target, tokens=16384, vocabulary=152064, hidden_sizes=(896, 1536, 3584))
    if part != "fit":
        tables = {"levers": update.LEVERS, "state": update.STATE, "activations": update.ACTIVATIONS}
        shape = "tiny" if small else "3B" if part == "levers" else "7B"
        workload = update.Workload(shape=shape, tokens=4096 if small else 16384, micro_batch=4096 if small else 8192)
        table, wanted = tables[part], arguments.cases or tables[part]
        first = next(iter(table))  # what the others are compared with
        return update.levers(workload, target, {n: s for n, s in table.items() if n == first or n in wanted})
    return (fit.fit(case, target) for case in arguments.cases or (["tiny"] if small else fit.CASES))
