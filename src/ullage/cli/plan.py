"""`ullage plan`: what a run will need of GPU, host and disk, phase by phase, before anything is loaded. No torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.base.errors import DoesNotFitError, UsageError
from ullage.base.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from ullage.config.tree import Config
    from ullage.planner.hardware import Machine
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
    parser.add_argument(
        "--gpu",
        help='what it should fit: h200, "4090 x2", 24GiB, or a cloud instance; memory.budget is used without it',
    )
    parser.add_argument("--nodes", type=int, default=1, help="machines of that kind")
    parser.add_argument("--ram", help="host memory of a machine, such as 64GiB; a cloud instance has its own")
    parser.add_argument("--explain", action="store_true", help="show every number's formula and inputs")
    parser.add_argument("--check", action="store_true", help=f"exit with {DoesNotFitError.code} where it does not fit")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the phases as a picture")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page that needs nothing else")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from ullage.planner.model_shape import find_shape
    from ullage.planner.plan import plan

    model, config = _given(arguments.model, overrides)
    machine = _machine(arguments, config)
    made = plan(find_shape(model), config, machine)
    if arguments.json:
        print(json.dumps(made.as_json(), indent=2))
    else:
        print("\n".join(_lines(made, explain=arguments.explain)))
    _draw(made, arguments)
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


def _machine(arguments: argparse.Namespace, config: Config) -> Machine | None:
    from ullage.planner.hardware import parse_machine, parse_size
    from ullage.planner.plan import budget_machine

    machine = parse_machine(arguments.gpu, arguments.nodes) if arguments.gpu else budget_machine(config)
    if machine is not None:
        return replace(machine, host_bytes=parse_size(arguments.ram)) if arguments.ram else machine
    for option in ("check", "ram"):
        if getattr(arguments, option):
            raise UsageError(f"--{option} needs --gpu", "say what it should fit, such as --gpu 24GiB")
    return None


def _draw(made: Plan, arguments: argparse.Namespace) -> None:
    """After the plan was told: a picture that cannot be written must not hide it."""
    if not (arguments.png or arguments.html):
        return
    from ullage.planner.picture import draw_html, draw_png
    from ullage.telemetry.run_directory import write_atomically

    if arguments.html:
        write_atomically(arguments.html, draw_html(made))
    if arguments.png:
        draw_png(made, arguments.png)


def _lines(made: Plan, *, explain: bool) -> list[str]:
    where = f" on {made.machine.text}" if made.machine else ""
    lines = [f"{made.shape.name}: {made.shape.parameters / 1e9:.2f} B parameters{where}", ""]
    whole = max(made.peak_bytes, made.capacity_bytes or 0)
    for phase in made.phases:
        mark = " <- binds" if phase is made.binding else ""
        lines.append(f"{phase.name:<15}{_bar(phase, made, whole)}{bytes_text(phase.total_bytes):>11}{mark}")
        parts = sorted(phase.components.items(), key=lambda item: -item[1])
        lines.append(f"{'':15}" + ", ".join(f"{name} {bytes_text(count)}" for name, count in parts))
        if explain:
            lines += [f"{'':17}{t.name} = {bytes_text(t.bytes)} = {t.explained()}" for t in phase.terms if t.bytes]
    host = ", ".join(f"{name} {bytes_text(count)}" for name, count in made.host.items() if count)
    disk = ", ".join(f"{name} {bytes_text(count)}" for name, count in made.disk.items())
    lines += ["", f"host memory    {bytes_text(made.host_bytes)} for each GPU: {host}", f"disk           {disk}"]
    seconds = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in made.seconds.items())
    lines += [f"a step         {seconds_text(made.step_seconds)}: {seconds}", "", made.verdict]
    return [*lines, *_told(made, explain=explain)]


def _told(made: Plan, *, explain: bool) -> Iterator[str]:
    """What was chosen, what could be changed, what was assumed."""
    if made.chosen:
        yield from ("", "chosen, the fastest that fits:" if made.fits else "chosen, what needs least:")
    for key, choice in made.chosen.items():
        yield f"  {_setting(key, choice['value']):<58} {choice['why']}"
    if made.fixes:
        yield from ("", "what would fit, the cheapest change first:")
    for fix in made.fixes:
        yield f"  {fix.change:<58} {bytes_text(fix.peak_bytes)}: {fix.alters}"
    if made.levers:
        yield from ("", "levers, the best first:")
    for lever in made.levers:
        yield f"  {lever.change:<58}-{bytes_text(lever.saves_bytes):<11}{lever.slowdown:+.1%} time"
    if made.assumptions:
        yield from ("", "assumed:", *(f"  {text}" for text in made.assumptions))
    if explain:
        from ullage.planner.seconds import FORMULAS

        yield from ("", "seconds:", *(f"  {text}" for text in FORMULAS))


def _setting(key: str, value: object) -> str:
    return f"{key}={str(value).lower()}"


def _bar(phase: Phase, made: Plan, whole: int) -> str:
    """A line as long as the phase is large, with a mark where the device ends."""
    filled = round(BAR * phase.total_bytes / whole)
    cells = ["#"] * filled + [" "] * (BAR - filled)
    if made.capacity_bytes:
        cells[max(0, min(BAR - 1, round(BAR * made.capacity_bytes / whole) - 1))] = "|"
    return "".join(cells)
