"""What predictions were worth: errors, bounds and the table of the memory benchmark, from its records alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ullage.bench.memory_draws import HELD_OUT, MODELS
from ullage.bench.rivals import LLMEM
from ullage.planner.components import CONTEXT, PROCESS

MIB = 1 << 20
TOLERANCE = 0.03
TOLERANCE_BYTES = 200 * MIB
"""A phase is right within the larger of the two."""
MARGIN = 1.03
"""Of the least capacity: what a run is told to have."""
FULL = 0.95
"""Of a card: one that the run would fill so far should not have been refused."""
SMALLEST = 1 << 28
"""Bytes of which a relative error says something."""
HOST = "host, trace"
TRACE, CLOSED = "trace", "closed form"
Number = TypeVar("Number", int, float)
Row = Mapping[str, Any]
"""A config's prediction and measurement, joined."""


# --- statistics ---


def relative(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def quantile(values: Sequence[float], share: float) -> float:
    """By nearest rank: one of the values, with at least this share of them not above it."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def errors(found: Sequence[float]) -> dict[str, Any]:
    """Of relative errors, in percent; median, p95 and mean are of their sizes, worst and bias keep the sign."""
    if not found:
        return {"n": 0}
    sizes = [abs(error) for error in found]
    under = [error for error in found if error < 0]

    def percent(value: float) -> float:
        return round(100 * value, 3)

    return {
        "n": len(found),
        "mean_percent": percent(sum(sizes) / len(sizes)),
        "median_percent": percent(quantile(sizes, 0.5)),
        "p95_percent": percent(quantile(sizes, 0.95)),
        "worst_percent": percent(max(found, key=abs)),
        "under_share_percent": percent(len(under) / len(found)),
        "under_worst_percent": percent(min(under, default=0.0)),
        "bias_percent": percent(sum(found) / len(found)),
    }


def upper_bound(failures: int, runs: int, confidence: float = 0.95) -> float:
    """The largest rate of failure under which so few failures still have a chance of 1 - confidence (one-sided,
    Clopper and Pearson 1934); 1 where nothing was tried."""
    if failures >= runs:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        chance = sum(math.comb(runs, k) * rate**k * (1 - rate) ** (runs - k) for k in range(failures + 1))
        low, high = (rate, high) if chance > 1 - confidence else (low, rate)
    return high


def within(predicted: int, measured: int) -> bool:
    return abs(predicted - measured) <= max(TOLERANCE * measured, TOLERANCE_BYTES)


# --- rows ---


def joined(records: Iterable[Row]) -> list[dict[str, Any]]:
    """One row for each config that was predicted and measured, in the order of the draw."""
    by_kind: dict[str, dict[str, Row]] = {"predicted": {}, "measured": {}}
    for record in records:
        if record["kind"] in by_kind:
            by_kind[record["kind"]][record["key"]] = record
    both = [
        {"predicted": predicted, "measured": by_kind["measured"][key]}
        for key, predicted in by_kind["predicted"].items()
        if key in by_kind["measured"]
    ]
    return sorted(both, key=lambda row: int(row["predicted"]["number"]))


def peaks(row: Row) -> dict[str, int]:
    """Predicted allocated peak of the run, by who predicts."""
    predicted = row["predicted"]
    own = {TRACE: max(predicted["trace"].values()), CLOSED: max(predicted["closed_form"].values())}
    return {**own, **predicted["rivals"]}


def phases_of(predicted: Mapping[str, Number], measured: Iterable[str], *, add: bool = False) -> dict[str, Number]:
    """Predicted phases under the names that were measured: the optimizer's step is a part of the update there.

    Of bytes the larger counts, of seconds the sum.
    """
    found = dict(predicted)
    if {"optimizer_step", "update"} <= found.keys() and "optimizer_step" not in set(measured):
        step, update = found.pop("optimizer_step"), found["update"]
        found["update"] = step + update if add else max(step, update)
    return found


def needed_bytes(predicted: Row) -> int:
    """What the planner asks of a card before it calls the config fitting."""
    return math.ceil(MARGIN * int(predicted["least_bytes"])) + CONTEXT


# --- the table ---


def summary(records: Sequence[Row], memory_bytes: int) -> dict[str, Any]:
    """Everything that the records say."""
    rows = joined(records)
    ran = [row for row in rows if row["measured"]["ran"]]
    found = {
        "predictors": predictors(ran),
        "subsets": {name: predictors(rows) for name, rows in subsets(ran).items()},
        "phases": phase_rows(ran),
        "memory": other_memory(ran),
        "safety": safety(rows, memory_bytes),
        "caps": caps(records),
        "time": step_time(ran),
        "code": {
            kind: sorted({record["code"] for record in records if record["kind"] == kind})
            for kind in ("predicted", "measured", "cap")
        },
    }
    return found | {"targets": targets(found), "rows": [_row(row) for row in rows]}


def tables(found: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """For people: every part of the summary as rows, without its configs; nothing where nothing was measured."""

    def without_sources(rows: Sequence[Row]) -> list[dict[str, Any]]:
        return [{name: value for name, value in row.items() if name != "source"} for row in rows]

    if not found["rows"]:
        return {}
    capped = [{"cap": f"{factor} x least capacity", **at} for factor, at in found["caps"].items()]
    return {
        "allocated peak of a run": without_sources(found["predictors"]),
        **{f"the same, {name}": without_sources(rows) for name, rows in found["subsets"].items()},
        "allocated peak of each phase": found["phases"],
        "other memory": found["memory"],
        "seconds of a step": found["time"],
        "configs called fitting": [found["safety"]],
        "caps": capped,
        "targets": found["targets"],
    }


def subsets(ran: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by method, and those of the family that no constant was fitted to."""
    found: dict[str, list[Row]] = {}
    for row in ran:
        model, method = row["predicted"]["model"], row["predicted"]["method"]
        found.setdefault(f"{method} only", []).append(row)
        if MODELS[model]["model_type"] == HELD_OUT:
            found.setdefault(f"{HELD_OUT} only, to which nothing was fitted", []).append(row)
    return dict(sorted(found.items()))


def predictors(ran: Sequence[Row]) -> list[dict[str, Any]]:
    """Errors of the allocated peak of a run, by predictor; the published one last, as its authors give it."""
    if not ran:
        return []
    names = list(peaks(ran[0]))
    found = []
    for name in names:
        made = [relative(peaks(row)[name], row["measured"]["allocated_bytes"]) for row in ran]
        taken = [row["predicted"]["seconds"].get(name) for row in ran]
        known = [seconds for seconds in taken if seconds is not None]
        found.append({"predictor": name, **errors(made), "seconds": _mean(known)})
    found.append({"predictor": LLMEM.name, "n": None, "worst_percent": LLMEM.worst_percent, "source": LLMEM.source})
    return found


def phase_rows(ran: Sequence[Row]) -> list[dict[str, Any]]:
    """Errors of every phase by both of our predictors, and how many are within the tolerance."""
    pairs: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row in ran:
        measured = row["measured"]["phases"]
        for predictor, key in ((TRACE, "trace"), (CLOSED, "closed_form")):
            predicted = phases_of(row["predicted"][key], measured)
            for phase in measured.keys() & predicted.keys():
                pair = (predicted[phase], measured[phase]["allocated"])
                pairs.setdefault((predictor, phase), []).append(pair)
    found = []
    for (predictor, phase), both in sorted(pairs.items()):
        made = errors([relative(*pair) for pair in both])
        right = sum(within(*pair) for pair in both)
        found.append(
            {"predictor": predictor, "phase": phase, "within": right}
            | {name: made[name] for name in ("n", "mean_percent", "p95_percent", "worst_percent", "bias_percent")}
        )
    return found


def other_memory(ran: Sequence[Row]) -> list[dict[str, Any]]:
    """Errors of what is not the allocated peak: the least capacity against what was reserved, the whole device, and
    host memory: of the process, and of its large buffers against all that it grew by, CUDA's libraries included."""
    kinds: dict[str, Callable[[Row, Row], tuple[int, int]]] = {
        "reserved, least capacity by trace": lambda p, m: (p["least_bytes"], m["reserved_bytes"]),
        "device, with the CUDA context": lambda p, m: (p["least_bytes"] + CONTEXT, m["device_bytes"]),
        HOST: lambda p, m: (p["host_bytes"] + PROCESS, m["host_bytes"]),
        "host, closed form": lambda p, m: (p["closed_form_host_bytes"], m["host_bytes"]),
        "host buffers, trace": lambda p, m: (p["host_bytes"], m["host_bytes"] - m["host_before_bytes"]),
    }
    found = []
    for kind, pair in kinds.items():
        pairs = [pair(row["predicted"], row["measured"]) for row in ran]
        counted = [both for both in pairs if min(both) >= SMALLEST]
        found.append({"memory": kind, **errors([relative(*both) for both in counted])})
    return found


def step_time(ran: Sequence[Row]) -> list[dict[str, Any]]:
    """Errors of the planner's seconds, by phase, of configs that ran alone; a first step also compiles its kernels."""
    pairs: dict[str, list[float]] = {}
    for row in ran:
        if row["measured"].get("workers", 1) > 1:
            continue
        measured = row["measured"]["phases"]
        for phase, value in phases_of(row["predicted"]["step_seconds"], measured, add=True).items():
            if phase in measured and measured[phase]["seconds"] > 0:
                pairs.setdefault(phase, []).append(relative(value, measured[phase]["seconds"]))
    return [{"phase": phase, **errors(found)} for phase, found in pairs.items()]


def safety(rows: Sequence[Row], memory_bytes: int) -> dict[str, Any]:
    """Of configs that were called fitting, how many ran out; of those that ran, how many would have been refused on a
    card that they fill to FULL."""
    fitting = [row for row in rows if needed_bytes(row["predicted"]) <= memory_bytes]
    out = [row for row in fitting if not row["measured"]["ran"]]
    ran = [row for row in rows if row["measured"]["ran"]]
    refused = [
        row for row in ran if needed_bytes(row["predicted"]) > (row["measured"]["allocated_bytes"] + CONTEXT) / FULL
    ]
    return {
        "called_fitting": len(fitting),
        "ran_out": len(out),
        "ran_out_bound_percent": round(100 * upper_bound(len(out), len(fitting)), 2),
        "refused_though_fitting": len(refused),
        "refused_though_fitting_percent": round(100 * len(refused) / len(ran), 2) if ran else None,
    }


def caps(records: Iterable[Row]) -> dict[str, Any]:
    """Runs at both caps, and those that went the other way than predicted."""
    tests = {(record["key"], record["factor"]): record for record in records if record["kind"] == "cap"}
    found: dict[str, Any] = {}
    for factor in sorted({factor for _, factor in tests}):
        here = [test for (_, at), test in tests.items() if at == factor]
        wrong = [test["number"] for test in here if test["ran"] != (factor > 1)]
        found[f"{factor:g}"] = {"n": len(here), "ran": sum(bool(test["ran"]) for test in here), "wrong": wrong}
    return found


def targets(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What this project asks of its planner, and whether these rows give it."""
    by_name = {row["predictor"]: row for row in found["predictors"]}
    host = next(row for row in found["memory"] if row["memory"] == HOST)
    traced = [row for row in found["phases"] if row["predictor"] == TRACE]
    missed = sum(row["n"] - row["within"] for row in traced)
    wrong = sum(len(at["wrong"]) for at in found["caps"].values())
    asked: list[tuple[str, float | None, float]] = [
        ("trace, mean %", by_name.get(TRACE, {}).get("mean_percent"), 0.5),
        ("trace, worst %", by_name.get(TRACE, {}).get("worst_percent"), 2.0),
        ("closed form, mean %", by_name.get(CLOSED, {}).get("mean_percent"), 2.0),
        ("closed form, worst %", by_name.get(CLOSED, {}).get("worst_percent"), 8.0),
        ("phases outside 3 % and 200 MiB", missed if traced else None, 0),
        ("host, worst %", host.get("worst_percent"), 5.0),
        ("called fitting, ran out", found["safety"]["ran_out"] if traced else None, 0),
        ("caps on the wrong side", wrong if found["caps"] else None, 0),
    ]
    return [
        {"target": name, "found": value, "at_most": most, "met": None if value is None else abs(value) <= most}
        for name, value, most in asked
    ]


def _row(row: Row) -> dict[str, Any]:
    predicted, measured = row["predicted"], row["measured"]
    return {
        "number": predicted["number"],
        "config": predicted["text"],
        "settings": predicted["settings"],
        "ran": measured["ran"],
        "predicted": {**peaks(row), "least_bytes": predicted["least_bytes"], "host_bytes": predicted["host_bytes"]},
        "predicted_phases": {TRACE: predicted["trace"], CLOSED: predicted["closed_form"]},
        "measured": {name: value for name, value in measured.items() if name not in ("kind", "key", "number")},
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None
