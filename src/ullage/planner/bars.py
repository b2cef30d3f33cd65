"""What every picture of a plan is drawn from: phases as bars of coloured parts against what there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ullage.planner.parts import PARTS, parts_of
from ullage.planner.phases import Phase

GIB = 1 << 30
COLOURS = {
    "weights": "#0072b2",
    "gradients": "#56b4e9",
    "optimizer": "#e69f00",
    "master": "#d55e00",
    "activations": "#009e73",
    "working_layer": "#8fd3be",
    "head": "#cc79a7",
    "kv_cache": "#f0e442",
    "graphs": "#882255",
    "gather": "#332288",
    "buffers": "#999999",
    "context": "#666666",
    "slack": "#d0d0d0",
}
"""Of every part. Okabe and Ito's colours, told apart by colour-blind eyes."""
OTHER = "#bbbbbb"
LIGHT_INK = ("weights", "graphs", "gather", "context")
"""Parts whose colour is dark."""
ROOM = 1.04
"""The axis is longer than what it shows by this much."""
TICKS = 9


class Bars(NamedTuple):
    """The phases of one run."""

    phases: Sequence[Phase]
    capacity: int | None
    """Bytes that are usable; None: of no machine."""

    @property
    def binding(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def axis_bytes(self) -> float:
        return ROOM * max(self.binding.total_bytes, self.capacity or 0)

    @property
    def names(self) -> list[str]:
        """Parts that some phase has, in the order of bars."""
        return list(parts_of(self.phases))

    @property
    def ticks(self) -> list[int]:
        """Round numbers of GiB, at most so many."""
        whole = self.axis_bytes / GIB
        sizes = (base * 10**power for power in range(6) for base in (1, 2, 5))
        size = next(size for size in sizes if whole / size < TICKS)
        return [at * GIB for at in range(0, int(whole) + 1, size)]


def parts(phase: Phase) -> list[tuple[str, int]]:
    """Of one bar, from left to right."""
    order = list(PARTS)
    place = {name: (order.index(name) if name in order else len(order), name) for name in phase.components}
    return sorted(phase.components.items(), key=lambda part: place[part[0]])


def colour(name: str) -> str:
    return COLOURS.get(name, OTHER)


def words(name: str) -> str:
    return name.replace("_", " ")
