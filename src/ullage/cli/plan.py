"""`ullage plan`: what a run will need of GPU, host and disk, phase by phase, before anything is loaded. No torch."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.base.errors import ConfigError, DoesNotFitError, UsageError
from ullage.base.units import bytes_text, seconds_text
from ullage.cli.errors_text import shown

if TYPE_CHECKING:
    from ullage.config.tree import Config
    from ullage.planner.hardware import Machine
    from ullage.planner.phases import Phase
    from ullage.planner.plan import Plan
    from ullage.planner.spread import Spread
    from ullage.run.traced_plan import TracedPlan

HELP = "predict memory by phase, from a model or a config, without loading anything"
BAR = 40
BEFORE, AFTER = 15, 20
"""Columns on both sides of a bar."""
NARROWEST = 45
"""Columns that text is folded to at least."""
_UNIT = re.compile(r"(\d) (?=[KMGT]?i?B\b|s\b)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL_OR_CONFIG",
        help="a config (.yaml), a model folder or GGUF file, a bundled name or Hub id, or a size such as 8B",
    )
    parser.add_argument(
        "--gpu",
        help='what it should fit: h200, "4090 x2", 24GiB, or a cloud instance; memory.budget is used without it',
    )
    parser.add_argument("--nodes", type=int, default=1, help="machines of that kind")
    parser.add_argument("--ram", help="host memory of a machine, such as 64GiB; a cloud instance has its own")
    parser.add_argument("--explain", action="store_true", help="show every number's formula, inputs and source")
    parser.add_argument(
        "--trace", action="store_true", help="run the phases on tensors without bytes and let that decide; needs torch"
    )
    parser.add_argument("--check", action="store_true", help=f"exit with {DoesNotFitError.code} where it does not fit")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write the phases as a picture")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page that needs nothing else")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from ullage.config.check import require_known_algorithm
    from ullage.planner.model_shape import find_shape
    from ullage.planner.plan import plan

    model, config = _given(arguments.model, overrides)
    require_known_algorithm(config)
    machine = _machine(arguments, config)
    traced = _traced(model, config, machine) if arguments.trace else None
    made = traced.plan if traced else plan(find_shape(model), config, machine)
    if arguments.json:
        print(json.dumps(made.as_json() | ({"traced": traced.as_json()} if traced else {}), indent=2))
    else:
        lines = _lines(made, explain=arguments.explain) + (traced.lines() if traced else [])
        print(shown("\n".join(_folded(lines)), sys.stdout))
    _draw(made, arguments)
    return DoesNotFitError.code if arguments.check and not made.fits else 0


def _given(text: str, overrides: list[str]) -> tuple[str, Config]:
    """The model, and the config of a run with it."""
    from ullage.config.load import load_config

    if not text.endswith((".yaml", ".yml")):
        return text, load_config(None, overrides).config
    config = load_config(Path(text), overrides).config
    if not config.actor_rollout_ref.model.path:
        raise ConfigError(f"{text}: actor_rollout_ref.model.path is empty", "set it, or give it as an override")
    return config.actor_rollout_ref.model.path, config


def _machine(arguments: argparse.Namespace, config: Config) -> Machine | None:
    from ullage.planner.hardware import parse_machine, parse_size
    from ullage.planner.plan import budget_machine

    named = arguments.gpu is not None
    if arguments.nodes != 1 and not named:
        raise UsageError("--nodes needs --gpu", "say what kind of GPU, such as --gpu 'h100 x8'")
    ranks = config.trainer.n_gpus_per_node
    machine = parse_machine(arguments.gpu, arguments.nodes, count=ranks) if named else budget_machine(config)
    if machine is not None:
        return replace(machine, host_bytes=parse_size(arguments.ram)) if arguments.ram else machine
    for option in ("check", "ram"):
        if getattr(arguments, option):
            raise UsageError(f"--{option} needs --gpu", "say what it should fit, such as --gpu 24GiB")
    return None


def _traced(model: str, config: Config, machine: Machine | None) -> TracedPlan:
    from ullage.planner.model_shape import find_shape

    if machine is None:
        raise UsageError("--trace needs --gpu", "say what it should fit, such as --gpu h200")
    print("tracing the phases of the run ...", file=sys.stderr, flush=True)
    from ullage.run.traced_plan import traced_for

    return traced_for(find_shape(model), config, machine, model)


def _draw(made: Plan, arguments: argparse.Namespace) -> None:
    """After the plan was told: a picture that cannot be written must not hide it."""
    if not (arguments.png or arguments.html):
        return
    from ullage.planner.picture import draw_png, write_html

    if arguments.html:
        write_html(made, arguments.html)
    if arguments.png:
        draw_png(made, arguments.png)


def _lines(made: Plan, *, explain: bool) -> list[str]:
    where = f" on {made.machine.text}" if made.machine else ""
    lines = [f"{made.shape.name}: {made.shape.parameters / 1e9:.2f} B parameters{where}", _workload(made), ""]
    lines += _bars(made.phases, made.capacity_bytes, parts=True, explain=explain)
    host = ", ".join(f"{name} {bytes_text(count)}" for name, count in made.host.items() if count)
    disk = ", ".join(f"{name} {bytes_text(count)}" for name, count in made.disk.items())
    lines += ["", f"host memory    {bytes_text(made.host_bytes)} for each GPU: {host}", f"disk           {disk}"]
    lines += [_step(made.step_seconds, made.seconds), "", made.verdict]
    return [*lines, *_told(made, explain=explain)]


def _workload(made: Plan) -> str:
    """What is planned: every sequence as long as it may be."""
    work = made.workload
    rank, base = work["lora_rank"], work["quantization"]
    trained = f"LoRA of rank {rank}{f' on {base}' if base else ''}" if rank else "all parameters"
    return (
        f"{work['algorithm']}, {trained}; {work['prompts']} prompts x {work['samples']} samples a step, "
        f"{work['prompt_tokens']} + {work['response_tokens']} tokens"
    )


def _told(made: Plan, *, explain: bool) -> Iterator[str]:
    """What was chosen, what could be changed, what was assumed."""
    why = "why" if made.fits else None  # where nothing fits, the title says it of all
    chosen = [(_setting(key, choice["value"]), choice[why] if why else "") for key, choice in made.chosen.items()]
    yield from _section("chosen, the fastest that fits:" if made.fits else "chosen, what needs least:", chosen)
    fixes = [(fix.change, f"{bytes_text(fix.peak_bytes)}: {fix.alters}") for fix in made.fixes]
    yield from _section("what would fit, the cheapest change first:", fixes)
    if made.fits is False and not (made.fixes or made.spread):
        yield from ("", "nothing known here would make it fit: no setting, no adapter, no GPU; take a smaller model")
    if made.spread:
        yield from _spread(made.spread, made.capacity_bytes, explain=explain)
    levers = [
        (lever.change, f"-{bytes_text(lever.saves_bytes):<11}{lever.slowdown:+.1%} time") for lever in made.levers
    ]
    yield from _section("levers, the best first:", levers)
    assumed = dict.fromkeys((*made.assumptions, *(made.spread.assumptions if made.spread else ())))
    yield from _section("assumed:", [(text, "") for text in assumed])
    if explain:
        from ullage.planner.explained import explained

        yield from explained(made)


def _spread(spread: Spread, capacity: int | None, *, explain: bool) -> Iterator[str]:
    """The run with its weights shared out, as far as formulas know it."""
    from ullage.planner.spread import NOT_YET

    yield from ("", f"{spread.text} it would fit, {NOT_YET}:", "")
    yield from _bars(spread.phases, capacity, parts=False, explain=explain)
    yield f"host memory    {bytes_text(spread.host_bytes)} for each GPU"
    yield _step(spread.step_seconds, spread.seconds)
    if spread.chosen:
        yield "with           " + " ".join(_setting(key, value) for key, value in spread.chosen.items())


def _section(title: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    """Rows in two columns below a title; nothing where there are none."""
    if rows:
        yield from ("", title)
    width = max((len(first) for first, _ in rows), default=0)
    yield from (f"  {first:<{width}}  {second}".rstrip() for first, second in rows)


def _bars(phases: Sequence[Phase], capacity: int | None, *, parts: bool, explain: bool) -> Iterator[str]:
    binding = max(phases, key=lambda phase: phase.total_bytes)
    whole = max(binding.total_bytes, capacity or 0)
    for phase in phases:
        mark = " <- binds" if phase is binding else ""
        yield f"{phase.name:<15}{_bar(phase, capacity, whole)}{bytes_text(phase.total_bytes):>11}{mark}"
        if parts:
            largest = sorted(phase.components.items(), key=lambda item: -item[1])
            yield f"{'':15}" + ", ".join(f"{name} {bytes_text(count)}" for name, count in largest)
        if explain:
            yield from (f"{'':17}{t.name} = {bytes_text(t.bytes)} = {t.explained()}" for t in phase.terms)


def _bar(phase: Phase, capacity: int | None, whole: int) -> str:
    """A line as long as the phase is large, with a mark where the device ends."""
    cells = min(BAR, (_columns() or BEFORE + BAR + AFTER) - BEFORE - AFTER)
    filled = round(cells * phase.total_bytes / whole)
    line = ["#"] * filled + [" "] * (cells - filled)
    if capacity:
        line[max(0, min(cells - 1, round(cells * capacity / whole) - 1))] = "|"
    return "".join(line)


def _step(total: float, seconds: Mapping[str, float]) -> str:
    told = ", ".join(f"{name} {each:.1f} s" for name, each in seconds.items())
    return f"a step         {seconds_text(total)}: {told}"


def _setting(key: str, value: object) -> str:
    return f"{key}={str(value).lower()}"


def _folded(lines: list[str]) -> list[str]:
    """Lines as wide as the terminal at most, what goes on indented; whole ones where no person reads them."""
    columns = _columns()
    if columns is None:
        return lines
    folded: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        joined = _UNIT.sub("\\1\0", line)
        parts = textwrap.wrap(joined, columns, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
        # Bars are not text: their spaces mean something.
        folded += [line] if len(line) <= columns or "#" in line else [part.replace("\0", " ") for part in parts]
    return folded


def _columns() -> int | None:
    """Of the terminal; None where there is none."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return max(NARROWEST, shutil.get_terminal_size().columns)
