"""`ullage advise`: what these GPUs can train, or what a model needs and what that costs."""

import argparse
import json
import sys
from dataclasses import replace

from ullage.base.errors import UsageError
from ullage.base.units import bytes_text, seconds_text
from ullage.cli.errors_text import shown
from ullage.planner.advise import (
    SHOWN,
    SPEEDS,
    Advice,
    assumed,
    base_config,
    least_bytes,
    what_fits,
    what_it_needs,
    what_it_would_need,
    what_would_fit,
)
from ullage.planner.hardware import Machine, parse_machine, parse_size
from ullage.planner.model_shape import Shape, find_shape
from ullage.planner.spread import NOT_YET

HELP = "what these GPUs can train, or what a model needs"
_FIT_COLUMNS = ("method", "algorithm", "largest model", "GPU", "host", "a step", "settings")
_NEED_COLUMNS = ("method", "algorithm", "least GPU", "1,000 steps", "a step", "on", "price of", "settings")
_ALREADY_SAID = ("algorithm.", "data.", "actor_rollout_ref.model.", "critic.model.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="what does it need? A bundled name, a folder, or a size such as 8B")
    parser.add_argument("--gpu", help="what can these train? `h200`, `4090 x2`, `24GiB`, or an instance: `p5.48xlarge`")
    parser.add_argument("--ram", help="host memory of the machine, such as 64GiB")
    parser.add_argument("--context", type=int, default=2048, help="tokens of prompt and response (default: 2048)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    del overrides
    if arguments.model is not None and arguments.gpu is not None:
        both = f"for both, `ullage plan {arguments.model} --gpu {arguments.gpu!r}`"
        raise UsageError("give a model or --gpu, not both", both)
    if arguments.model is None and arguments.gpu is None:
        raise UsageError("give a model or --gpu", 'such as `ullage advise --gpu "4090 x2"` or `ullage advise 8B`')
    if arguments.ram and not arguments.gpu:
        raise UsageError("--ram without --gpu", "it describes the machine that you have")
    if arguments.gpu is not None:
        machine = parse_machine(arguments.gpu)
        if arguments.ram:
            machine = replace(machine, host_bytes=parse_size(arguments.ram))
        _show_fits(machine, arguments.context, as_json=arguments.json)
    else:
        _show_needs(find_shape(arguments.model), arguments.context, as_json=arguments.json)
    return 0


def _show_fits(machine: Machine, context: int, *, as_json: bool) -> None:
    found = what_fits(machine, context)
    spread = what_would_fit(machine, context, found)
    if as_json:
        told = {
            "context": context,
            "advice": [advice.as_json() for advice in found],
            "sharded": [advice.as_json() for advice in spread],
            "formulas": SPEEDS,
        }
        print(json.dumps(told, indent=2))
        return
    lines = [f"{machine.text}: {bytes_text(machine.gpu.memory_bytes)} usable on each GPU; {_workload(context)}", ""]
    rows: list[tuple[str, ...]] = [_FIT_COLUMNS]
    rows += [_fit_row(advice) for advice in found]
    lines += _table(rows)
    if spread:
        lines += ["", f"with weights shared out over the {machine.gpus} GPUs, {NOT_YET}:", ""]
        lines += _table([(*_FIT_COLUMNS[:-1], "sharding", "settings"), *(_spread_row(advice) for advice in spread)])
    lines += ["", *_notes(machine)]
    _print(lines)


def _show_needs(shape: Shape, context: int, *, as_json: bool) -> None:
    found = what_it_needs(shape, context)
    least = {key: least_bytes(shape, *key, context) for key in found}
    spread = what_it_would_need(shape, context, found)
    if as_json:
        told = [
            {
                "method": key[0],
                "algorithm": key[1],
                "least_bytes": least[key],
                "fits_on": [advice.as_json() for advice in fits],
                "sharded_on": [advice.as_json() for advice in spread[key]],
            }
            for key, fits in found.items()
        ]
        said = {"model": shape.name, "parameters": shape.parameters, "context": context}
        print(json.dumps({**said, "advice": told, "formulas": SPEEDS}, indent=2))
        return
    lines = [f"{shape.name}: {shape.parameters / 1e9:.2f} billion parameters; {_workload(context)}", ""]
    rows: list[tuple[str, ...]] = [_NEED_COLUMNS]
    for key, fits in found.items():
        rows += [_need_row(advice, least[key]) for advice in _different(fits)]
        rows += [] if fits else [(*_named(*key), bytes_text(least[key]), "-", "-", "no GPU known here", "-", "-")]
    lines += _table(rows)
    if any(spread.values()):
        lines += ["", f"with weights shared out over a machine's GPUs, {NOT_YET}:", ""]
        shared = [_shared_row(advice) for each in spread.values() for advice in each]
        lines += _table([(*_NEED_COLUMNS[:2], "each GPU", *_NEED_COLUMNS[3:-1], "sharding", "settings"), *shared])
    lines += ["", *(f"- {text}" for text in assumed(shape, context)), *_notes(None)]
    _print(lines)


def _different(fits: list[Advice]) -> list[Advice]:
    """The cheapest few, each with another GPU."""
    first: dict[str, Advice] = {}
    for advice in fits:
        first.setdefault(advice.machine.gpu.name, advice)
    return list(first.values())[:SHOWN]


def _fit_row(advice: Advice) -> tuple[str, ...]:
    option, named = advice.option, _named(advice.method, advice.algorithm)
    if option is None or advice.shape is None or advice.seconds is None:
        return (*named, "none of those bundled", "-", "-", "-", "-")
    host = bytes_text(option.host_bytes * advice.machine.count)
    return (*named, advice.shape.name, bytes_text(option.peak_bytes), host, seconds_text(advice.seconds), _keys(advice))


def _need_row(advice: Advice, least: int) -> tuple[str, ...]:
    rented, cost = advice.instance, advice.cost
    where = advice.machine.text if rented is None else f"{rented.provider} {rented.name} ({advice.machine.text})"
    price = "-" if cost is None else f"${cost:,.0f}"
    dated = "-" if rented is None or cost is None else rented.date
    seconds = "-" if advice.seconds is None else seconds_text(advice.seconds)
    return (*_named(advice.method, advice.algorithm), bytes_text(least), price, seconds, where, dated, _keys(advice))


def _spread_row(advice: Advice) -> tuple[str, ...]:
    *row, keys = _fit_row(advice)
    return (*row, _sharding(advice), keys)


def _shared_row(advice: Advice) -> tuple[str, ...]:
    *row, keys = _need_row(advice, 0 if advice.option is None else advice.option.peak_bytes)
    return (*row, _sharding(advice), keys)


def _sharding(advice: Advice) -> str:
    return "-" if advice.sharding is None else advice.sharding.text


def _named(method: str, algorithm: str) -> tuple[str, str]:
    return method, algorithm.upper()


def _keys(advice: Advice) -> str:
    settings = {} if advice.option is None else advice.option.settings
    told = {key: str(value).lower() for key, value in settings.items() if not key.startswith(_ALREADY_SAID)}
    return " ".join(f"{key}={value}" for key, value in told.items()) or "-"


def _workload(context: int) -> str:
    config, _ = base_config("full", "grpo", context)
    data, n = config.data, config.actor_rollout_ref.rollout.n
    lengths = f"{data.max_prompt_length} + {data.max_response_length} tokens"
    return f"{data.train_batch_size} prompts x {n} samples a step, {lengths}"


def _notes(machine: Machine | None) -> list[str]:
    notes = [] if machine is None else [*machine.gpu.assumptions]
    if machine is not None and machine.host_bytes is None:
        notes.append("host memory is taken to suffice; say what there is with --ram")
    notes.append("every GPU holds a whole replica: more of them are faster, not larger")
    notes.append("below a row: keys that differ from their defaults there; `ullage train` chooses them by itself")
    return [f"- {note}" for note in (*notes, *SPEEDS)]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """In columns, but for the settings of a row, which are longer than a line: they go below it."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for *cells, settings in rows:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
        lines += [] if settings in ("-", "settings") else [f"{'':8}{settings}"]
    return lines


def _print(lines: list[str]) -> None:
    print(shown("\n".join(lines), sys.stdout))
