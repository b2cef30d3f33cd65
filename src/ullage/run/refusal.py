"""A plan that does not fit: which phase binds, what it would hold, and the cheapest change that makes it fit."""

from __future__ import annotations

from ullage.base.errors import DoesNotFitError
from ullage.base.units import bytes_text
from ullage.config.settle import AUTO
from ullage.planner.fixes import Fix
from ullage.planner.plan import Plan

TOLD = 2
"""Fixes that are named, the cheapest first."""


def refusal(made: Plan) -> DoesNotFitError:
    """Of the smallest plan there is for its config."""
    assert made.machine is not None, "there is something that it does not fit"
    budget, rows = made.config.memory.budget, made.binding.components
    there = made.machine.gpu.name if budget == AUTO else f"memory.budget = {budget}"
    capacity = made.capacity_bytes or 0
    needs, has = bytes_text(made.peak_bytes), bytes_text(capacity)
    cause = f"{made.binding.name} does not fit: it needs at least {needs}, there are {has} ({there})"
    if made.peak_bytes <= capacity:  # it is the host that has too little
        cause, rows = f"the run {made.verdict}", made.host
    table = [f"  {name:<15}{bytes_text(count):>12}" for name, count in rows.items() if count]
    remedy = "; or ".join(_text(fix) for fix in made.fixes[:TOLD])
    return DoesNotFitError("\n".join([cause, "planned for it:", *table]), remedy or "take a smaller model")


def _text(fix: Fix) -> str:
    """A GPU is named as a command line would, which is no key of a run."""
    change = fix.alters if fix.change.startswith("--") else f"set {fix.change} ({fix.alters})"
    return f"{change}: {bytes_text(fix.peak_bytes)}"
