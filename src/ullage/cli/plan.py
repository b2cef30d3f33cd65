"""`ullage plan`: what a run will need of GPU, host and disk, phase by phase, before anything is loaded. No torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.base.errors import DoesNotFitError, UsageError
from ullage.base.units import bytes_text

if TYPE_CHECKING:
    from ullage.config.tree import Config
    from ullage.planner.phases import Phase
    from ullage.planner.plan import Plan

HELP = "predict memory by phase, from a model or a config, without loading anything"
BAR = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="a config (.yaml), a model folder, a bundled name, or a size such as 8B",
    )
    parser.add_argument("--gpu", help='what it should fit: h200, "4090 x2", 24GiB, or a cloud instance')
    parser.add_argument("--nodes", type=int, default=1, help="machines of that kind")
    parser.add_argument("--explain", action="store_true", help="show every number's formula and inputs")
    parser.add_argument("--check", action="store_true", help=f"exit with {DoesNotFitError.code} where it does not fit")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from ullage.planner.hardware import parse_machine
    from ullage.planner.model_shape import find_shape
    from ullage.planner.plan import plan

    if arguments.check and not arguments.gpu:
        raise UsageError("--check needs --gpu", "say what it should fit, such as --gpu 24GiB")
    model, config = _given(arguments.model, overrides)
    machine = parse_machine(arguments.gpu, arguments.nodes) if arguments.gpu else None
    made = plan(find_shape(model), config, machine)
    if arguments.json:
        print(json.dumps(made.as_json(), indent=2))
    else:
        print("\n".join(_lines(made, explain=arguments.explain)))
    return DoesNotFitError.code if arguments.check and not made.fits else 0


def _given(text: str, overrides: list[str]) -> tuple[str, Config]:
    """The model, and the config of a run with it."""
    from ullage.config.load import load_config

    if not text.endswith((".yaml", ".yml")):
        return text, load_config(None, overrides).config
    config = load_config(Path(text), overrides).config
    if not config.actor_rollout_ref.model.path:
        raise UsageError(f"{text}: actor_rollout_ref.model.path is empty", "set it, or give it as an override")
    return config.actor_rollout_ref.model.path, config


def _lines(made: Plan, *, explain: bool) -> list[str]:
    where = f" on {made.machine.text}" if made.machine else ""
    lines = [f"{made.shape.name}: {made.shape.parameters / 1e9:.2f} B parameters{where}", ""]
    whole = max(made.peak_bytes, made.machine.gpu.memory_bytes if made.machine else 0)
    for phase in made.phases:
        mark = " <- binds" if phase is made.binding else ""
        lines.append(f"{phase.name:<15}{_bar(phase, made, whole)}{bytes_text(phase.total_bytes):>11}{mark}")
        parts = sorted(phase.components.items(), key=lambda item: -item[1])
        lines.append(f"{'':15}" + ", ".join(f"{name} {bytes_text(count)}" for name, count in parts))
        if explain:
            lines += [f"{'':17}{t.name} = {bytes_text(t.bytes)} = {t.explained()}" for t in phase.terms if t.bytes]
    host = ", ".join(f"{name} {bytes_text(count)}" for name, count in made.host.items() if count)
    disk = ", ".join(f"{name} {bytes_text(count)}" for name, count in made.disk.items())
    lines += ["", f"host memory    {bytes_text(made.host_bytes)} for each GPU: {host}", f"disk           {disk}", ""]
    lines.append(made.verdict)
    if made.levers:
        lines += ["", "levers, the best first:"]
    for lever in made.levers:
        cost = lever.cost
        lost = "time not measured" if cost.slowdown is None else f"{cost.slowdown:+.0%} time"
        source = f" ({cost.source})" if explain else ""
        lines.append(f"  {lever.change:<58}-{bytes_text(lever.saves_bytes):<11}{lost}{source}")
    if made.assumptions:
        lines += ["", "assumed:", *(f"  {text}" for text in made.assumptions)]
    return lines


def _bar(phase: Phase, made: Plan, whole: int) -> str:
    """A line as long as the phase is large, with a mark where the device ends."""
    filled = round(BAR * phase.total_bytes / whole)
    cells = ["#"] * filled + [" "] * (BAR - filled)
    if made.machine:
        cells[min(BAR - 1, round(BAR * made.machine.gpu.memory_bytes / whole) - 1)] = "|"
    return "".join(cells)
