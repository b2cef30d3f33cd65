"""Events of a program that allocates, and what a model of the allocator makes of them: peaks, least capacity, depth."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ullage.planner.allocator import LARGE_SEGMENT, MIB, CachingAllocator, DoesNotFitError, Mode, Owner


@dataclass(frozen=True, slots=True)
class Allocate:
    """A storage comes to life."""

    key: int
    size: int
    owner: Owner = "main"
    """Of the blocks it comes from."""


@dataclass(frozen=True, slots=True)
class Release:
    """A storage dies."""

    key: int


@dataclass(frozen=True, slots=True)
class Empty:
    """What is cached and free goes back to the device."""


@dataclass(frozen=True, slots=True)
class Enter:
    """A phase begins; peaks are counted anew."""

    phase: str


Event = Allocate | Release | Empty | Enter


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes a phase holds in blocks, and the most the allocator has taken from the device by then."""

    allocated: int
    reserved: int


def replay(events: Iterable[Event], mode: Mode = "expandable", capacity: int | None = None) -> dict[str, Peak]:
    """Run events through a fresh allocator; each phase's peaks, in order. Raises `DoesNotFitError` at the capacity."""
    allocator = CachingAllocator(mode, capacity)
    peaks: dict[str, Peak] = {}
    phase: str | None = None
    for event in events:
        if not isinstance(event, Enter):
            _apply(allocator, event)
        else:
            if phase is not None:
                _note(peaks, phase, allocator)
            phase = event.phase
            allocator.reset_peak()
    if phase is not None:
        _note(peaks, phase, allocator)
    return peaks


def least_capacity(events: Sequence[Event], mode: Mode = "expandable", tolerance: int = 2 * MIB) -> int:
    """The least capacity, to `tolerance` bytes, under which the events run to their end."""
    one_phase = [Enter("all"), *(event for event in events if not isinstance(event, Enter))]
    fails, fits = 0, replay(one_phase, mode)["all"].reserved + LARGE_SEGMENT
    while fits - fails > tolerance:
        middle = (fits + fails) // 2
        try:
            replay(one_phase, mode, middle)
        except DoesNotFitError:
            fails = middle
        else:
            fits = middle
    return fits


def graphs_bytes(events: Iterable[Event], mode: Mode = "expandable") -> int:
    """What captured graphs keep to themselves, which no later phase can use."""
    allocator = CachingAllocator(mode)
    own: set[int] = set()
    for event in events:
        if isinstance(event, Allocate) and event.owner == "graphs":
            own.add(event.key)
            _apply(allocator, event)
        elif isinstance(event, Release) and event.key in own:
            own.remove(event.key)
            _apply(allocator, event)
    return allocator.reserved


def extrapolate(shallow: Mapping[int, Iterable[Event]], layers: int, mode: Mode = "expandable") -> dict[str, int]:
    """Allocated peaks by phase at a depth, from the events of the same program at two shallower ones (two layers up).

    A phase's peak is the highest of many moments, and which one is highest may change with depth. So each moment that
    both programs have grows along its own line; the line through the two peaks is a lower bound. Layers lie in the
    middle of what is entered at once: its beginning and its end are what both have. A phase may be entered many times.
    """
    (low, lower), (high, higher) = ((depth, _levels(events, mode)) for depth, events in sorted(shallow.items()))
    peaks = dict.fromkeys((phase for phase, _ in lower), 0)
    for (phase, moments), (_, deeper) in zip(lower, higher, strict=True):
        highest = (max(level for _, level in moments), max(level for _, level in deeper))
        last = (moments[-1][1], deeper[-1][1])
        pairs = [highest, last, *_shared(moments, deeper)]
        grown = (first + (second - first) * (layers - low) // (high - low) for first, second in pairs)
        peaks[phase] = max(peaks[phase], max(grown))
    return peaks


def _levels(events: Iterable[Event], mode: Mode) -> list[tuple[str, list[tuple[int, int]]]]:
    """For each phase its moments in order, its start and every allocation: bytes that came, and bytes allocated then.

    Frees are no moments: nothing peaks there, and what dies together may die in any order.
    """
    allocator = CachingAllocator(mode)
    phases: list[tuple[str, list[tuple[int, int]]]] = [("", [])]
    for event in events:
        if isinstance(event, Enter):
            phases.append((event.phase, [(0, allocator.allocated)]))
            continue
        _apply(allocator, event)
        if isinstance(event, Allocate):
            phases[-1][1].append((event.size, allocator.allocated))
    return phases[1:]


def _shared(moments: list[tuple[int, int]], deeper: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Levels of the moments with which both begin, and of those with which both end, told by what came.

    Where the shorter one is part of both, its first half is a beginning and its second half an end.
    """
    alike = [one[0] == other[0] for one, other in zip(moments, deeper, strict=False)]
    alike_at_end = [one[0] == other[0] for one, other in zip(moments[::-1], deeper[::-1], strict=False)]
    begins = [*alike, False].index(False)
    ends = [*alike_at_end, False].index(False)
    overlap = max(0, begins + ends - len(moments))
    for i in range(begins - overlap // 2):
        yield moments[i][1], deeper[i][1]
    for i in range(1, ends - (overlap - overlap // 2) + 1):
        yield moments[-i][1], deeper[-i][1]


def _note(peaks: dict[str, Peak], phase: str, allocator: CachingAllocator) -> None:
    earlier = peaks.get(phase, Peak(0, 0))
    peaks[phase] = Peak(
        max(earlier.allocated, allocator.peak_allocated), max(earlier.reserved, allocator.peak_reserved)
    )


def _apply(allocator: CachingAllocator, event: Allocate | Release | Empty) -> None:
    if isinstance(event, Allocate):
        allocator.allocate(event.key, event.size, event.owner)
    elif isinstance(event, Release):
        allocator.release(event.key)
    else:
        allocator.empty_cache()
