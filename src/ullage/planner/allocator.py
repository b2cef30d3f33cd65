"""A model of PyTorch's CUDA caching allocator: what a list of allocations and frees makes it hold and reserve."""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["native", "expandable"]

MIB = 2**20
_SMALLEST = 512  # every request is rounded up to a multiple of this
_SMALL_LIMIT = MIB  # requests up to here live in the small pool
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB  # from here on a request that finds no free block gets a segment of its own
_SEGMENT_STEP = 2 * MIB
_ADDRESS_SPACE = 2**25 * _LARGE_SEGMENT  # of one expandable segment: whole pages, and more than any device has


@dataclass(frozen=True, slots=True)
class Allocate:
    """A storage comes to life."""

    key: int
    size: int


@dataclass(frozen=True, slots=True)
class Release:
    """A storage dies."""

    key: int


@dataclass(frozen=True, slots=True)
class Enter:
    """A phase begins; peaks are counted anew."""

    phase: str


Event = Allocate | Release | Enter


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes a phase holds in blocks, and the most the allocator has taken from the device by then."""

    allocated: int
    reserved: int


class DoesNotFitError(Exception):
    """The replayed program asks for more than the capacity, even after every free segment went back."""


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    small: bool
    mapped: bool = True
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


class _FreeBlocks:
    """The mapped free blocks of one pool, ordered by size and then address."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []
        self._at: dict[int, _Block] = {}

    def add(self, block: _Block) -> None:
        bisect.insort(self._order, (block.size, block.address))
        self._at[block.address] = block

    def remove(self, block: _Block) -> None:
        del self._order[bisect.bisect_left(self._order, (block.size, block.address))]
        del self._at[block.address]

    def at_least(self, size: int) -> Iterator[_Block]:
        """Blocks that hold `size`, the smallest first."""
        for place in range(bisect.bisect_left(self._order, (size, 0)), len(self._order)):
            yield self._at[self._order[place][1]]

    def everything(self) -> list[_Block]:
        return [self._at[address] for _, address in self._order]


class CachingAllocator:
    """One device, one stream: rounding, pools, best fit, splitting, merging, and giving segments back when full.

    The rules are those of c10's CUDACachingAllocator with its default settings (no `max_split_size_mb`, no
    rounding to powers of two, no garbage collection), with or without `expandable_segments:True`.
    """

    def __init__(self, mode: Mode = "expandable", capacity: int | None = None) -> None:
        self._expandable = mode == "expandable"
        self._capacity = capacity
        self._free = {True: _FreeBlocks(), False: _FreeBlocks()}
        self._unmapped: dict[bool, dict[int, _Block]] = {True: {}, False: {}}
        self._live: dict[int, _Block] = {}
        self._next_address = 0
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0

    def reset_peak(self) -> None:
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def allocate(self, key: int, size: int) -> None:
        if size == 0:
            return
        size = _round_up(size, _SMALLEST)
        small = size <= _SMALL_LIMIT
        block = self._find(size, small) or self._grow(size, small)
        if block is None:
            self.empty_cache()
            block = self._grow(size, small)
        if block is None:
            raise DoesNotFitError(f"{size} bytes asked for, {self.reserved} of {self._capacity} reserved")
        self._free[small].remove(block)
        self._split(block, size)
        block.free = False
        self._live[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def release(self, key: int) -> None:
        block = self._live.pop(key, None)
        if block is None:  # it had no bytes
            return
        self.allocated -= block.size
        block.free = True
        self._free[block.small].add(self._merge(block))

    def empty_cache(self) -> None:
        """Give every wholly free segment (expandable: page) back to the device."""
        for small, free in self._free.items():
            for block in free.everything():
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._free[small].remove(block)
                    self.reserved -= block.size

    def _find(self, size: int, small: bool) -> _Block | None:
        candidates = self._free[small].at_least(size)
        best = next(candidates, None)
        if best is None or not self._expandable:
            return best
        # A block before unmapped addresses counts with what it could grow to, so that holes are filled first.
        for block in candidates:
            if _growable_size(block) >= _growable_size(best):
                break
            best = block
        return best

    def _grow(self, size: int, small: bool) -> _Block | None:
        """A free block of at least `size`, in the free list, from memory the device hands out now."""
        segment = _segment_size(size)
        if self._capacity is not None and self.reserved + segment > self._capacity:
            return None
        if self._expandable:
            block = self._extend(size, small)
        else:
            block = _Block(self._next_address, segment, small)
            self._next_address += segment
            self._free[small].add(block)
            self._reserve(segment)
        return block

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _extend(self, size: int, small: bool) -> _Block:
        block = self._room(size, small)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            after = block.after
            if after is None or after.mapped:
                raise AssertionError("a free run ends before the bytes it was chosen for")
            block = self._map(after, min(size - block.size, after.size))
        return block

    def _room(self, size: int, small: bool) -> _Block:
        """The first unmapped block, or the free block before it, from where `size` bytes can become one block."""
        for address in sorted(self._unmapped[small]):
            block = self._unmapped[small][address]
            if block.before is not None and block.before.free:
                block = block.before
            if _free_run(block) >= size:
                return block
        block = _Block(self._next_address, _ADDRESS_SPACE, small, mapped=False)
        self._next_address += _ADDRESS_SPACE
        self._unmapped[small][block.address] = block
        return block

    def _map(self, block: _Block, size: int) -> _Block:
        """Map whole pages from the start of an unmapped block; returns the free block they end up in."""
        del self._unmapped[block.small][block.address]
        size = _round_up(size, _SMALL_SEGMENT if block.small else _LARGE_SEGMENT)
        if size < block.size:
            rest = _cut(block, size)
            self._unmapped[block.small][rest.address] = rest
        block.mapped = True
        self._reserve(size)
        block = self._merge(block)
        self._free[block.small].add(block)
        return block

    def _unmap(self, block: _Block) -> None:
        page = _SMALL_SEGMENT if block.small else _LARGE_SEGMENT
        first = _round_up(block.address, page)
        size = (block.address + block.size) // page * page - first
        if size <= 0:
            return
        free = self._free[block.small]
        free.remove(block)
        if first > block.address:
            block, head = _cut(block, first - block.address), block
            free.add(head)
        if size < block.size:
            free.add(_cut(block, size))
        block.mapped = False
        self.reserved -= size
        block = self._merge(block)
        self._unmapped[block.small][block.address] = block

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if rest >= _SMALLEST if block.small or self._expandable else rest > _SMALL_LIMIT:
            self._free[block.small].add(_cut(block, size))

    def _merge(self, block: _Block) -> _Block:
        """Join a block that is in no list with its free neighbours of the same kind; returns the whole."""
        after, before = block.after, block.before
        if after is not None and after.free and after.mapped == block.mapped:
            self._forget(after)
            _join(block, after)
        if before is not None and before.free and before.mapped == block.mapped:
            self._forget(before)
            _join(before, block)
            return before
        return block

    def _forget(self, block: _Block) -> None:
        if block.mapped:
            self._free[block.small].remove(block)
        else:
            del self._unmapped[block.small][block.address]


def replay(events: Iterable[Event], mode: Mode = "expandable", capacity: int | None = None) -> dict[str, Peak]:
    """Run events through a fresh allocator; each phase's peaks, in order. Raises `DoesNotFitError` at the capacity."""
    allocator = CachingAllocator(mode, capacity)
    peaks: dict[str, Peak] = {}
    phase: str | None = None
    for event in events:
        if isinstance(event, Allocate):
            allocator.allocate(event.key, event.size)
        elif isinstance(event, Release):
            allocator.release(event.key)
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
    fails, fits = 0, replay(one_phase, mode)["all"].reserved + _LARGE_SEGMENT
    while fits - fails > tolerance:
        middle = (fits + fails) // 2
        try:
            replay(one_phase, mode, middle)
        except DoesNotFitError:
            fails = middle
        else:
            fits = middle
    return fits


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
        if isinstance(event, Allocate):
            allocator.allocate(event.key, event.size)
            phases[-1][1].append((event.size, allocator.allocated))
        elif isinstance(event, Release):
            allocator.release(event.key)
        else:
            phases.append((event.phase, [(0, allocator.allocated)]))
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


def _cut(block: _Block, size: int) -> _Block:
    """Shorten a block to `size`; returns the rest, linked behind it and in no list."""
    rest = _Block(block.address + size, block.size - size, block.small, mapped=block.mapped)
    rest.before, rest.after = block, block.after
    if rest.after is not None:
        rest.after.before = rest
    block.after = rest
    block.size = size
    return rest


def _join(left: _Block, right: _Block) -> None:
    left.size += right.size
    left.after = right.after
    if left.after is not None:
        left.after.before = left


def _free_run(block: _Block) -> int:
    """Bytes from the start of a block to the next one in use."""
    size, following = block.size, block.after
    while following is not None and following.free:
        size += following.size
        following = following.after
    return size


def _growable_size(block: _Block) -> int:
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _segment_size(size: int) -> int:
    if size <= _SMALL_LIMIT:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT else _round_up(size, _SEGMENT_STEP)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
