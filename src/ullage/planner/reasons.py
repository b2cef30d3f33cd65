"""Why a key was given its value: what the nearest other value would need, or cost, with everything else as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ullage.base.units import bytes_text
from ullage.planner.hardware import GPU

if TYPE_CHECKING:
    from ullage.planner.choose import Held, Made, Space, Way

Part = TypeVar("Part", "Held", "Made")
NOTICED = 0.05
"""Seconds of a step below which a difference is not told."""


class Reasons:
    """Of one combination that was chosen."""

    def __init__(
        self, space: Space, way: Way, gpu: GPU, capacity: int, host: int | None, scale: Mapping[str, float]
    ) -> None:
        self._space, self._held, self._made = space, way.held, way.made
        self._gpu, self._capacity, self._host, self._scale = gpu, capacity, host, scale
        self._seconds = space.seconds(way.held, way.made, gpu)

    def of(self, name: str, *, fits: bool) -> str:
        if not fits:
            return "nothing fits; with this the run needs least"
        if name == "activation_share" and self._made.activation_offload == "none":
            return "nothing leaves"
        stays = name in self._held._fields
        if stays:
            others = [(held, self._made) for held in _varied(self._space.held, self._held, name)]
        else:
            others = [(self._held, made) for made in _varied(self._space.made, self._made, name)]
        if len(others) == 1:
            return "there is nothing else to choose"
        # The neighbour that needs more memory; of the value that needs most, the neighbour that needs less.
        place = others.index((self._held, self._made))
        held, made = others[place - 1 if place else 1]
        told = str(getattr(held if stays else made, name)).lower()
        return self._compared(told, held, made, most=place == 0)

    def _compared(self, other: str, held: Held, made: Made, *, most: bool) -> str:
        slower = self._space.seconds(held, made, self._gpu) - self._seconds
        peak = self._space.peak(held, made, self._scale)
        if peak.total_bytes > self._capacity:
            needs = f"{peak.name} would need {bytes_text(peak.total_bytes)} of {bytes_text(self._capacity)}"
            return f"{needs} with {other}; this costs {_cost(-slower)} a step"
        on_host = sum(self._space.layout(held, made).host().values())
        if self._host is not None and on_host > self._host:
            needs = f"a process would need {bytes_text(on_host)} of host memory, of {bytes_text(self._host)}"
            return f"{needs}, with {other}; this costs {_cost(-slower)} a step"
        if slower <= -NOTICED:
            return f"plainer; {other} would save {-slower:.1f} s a step, {-slower / self._seconds:.1%}"
        return f"{'it fits' if most else 'the fastest'}; {other} would cost {_cost(slower)} a step"


def _varied(parts: Sequence[Part], chosen: Part, name: str) -> list[Part]:
    """One for each value of a field, otherwise as much like the chosen one as there is."""

    def alike(part: Part) -> int:
        return sum(ours == theirs for ours, theirs in zip(part, chosen, strict=True))

    nearest: dict[object, Part] = {}
    for part in parts:
        value = getattr(part, name)
        if name == "activation_share" and part[:-1] != chosen[:-1]:
            continue  # a share means something only beside what it is a share of
        if value not in nearest or alike(part) > alike(nearest[value]):
            nearest[value] = part
    return list(nearest.values())


def _cost(seconds: float) -> str:
    return f"{seconds:+.1f} s" if seconds >= NOTICED else "next to nothing"
