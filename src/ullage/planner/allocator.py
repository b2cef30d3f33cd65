"""A model of PyTorch's CUDA caching allocator: what allocations and frees make it hold and reserve."""

import bisect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Mode = Literal["native", "expandable"]
Owner = Literal["main", "side", "graphs"]
"""Whose blocks they are: the main queue's, a side queue's, or the private pool's of captured graphs."""
Pool = tuple[Owner, bool]
"""Nobody uses another's free blocks, and small requests have blocks apart (True)."""

MIB = 2**20
_SMALLEST = 512  # every request is rounded up to a multiple of this
_SMALL_LIMIT = MIB  # requests up to here live in the small pool
_SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # what expandable segments grow by
_OWN_SEGMENT = 10 * MIB  # from here on a request that finds no free block gets a segment of its own
_SEGMENT_STEP = 2 * MIB
_ADDRESS_SPACE = 2**25 * LARGE_SEGMENT  # of one expandable segment: whole pages, and more than any device has


class DoesNotFitError(Exception):
    """The replayed program asks for more than the capacity, even after every free segment went back."""


@dataclass(slots=True, eq=False)
class _Block:
    address: int
    size: int
    pool: Pool
    mapped: bool = True
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None

    @property
    def is_small(self) -> bool:
        return self.pool[1]


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
    """One device: rounding, pools, best fit, splitting, merging, and giving segments back when full.

    The rules are those of c10's CUDACachingAllocator with its default settings (no `max_split_size_mb`, no
    rounding to powers of two, no garbage collection), with or without `expandable_segments:True`. A queue has blocks
    and segments of its own, and so have graphs, whose segments stay theirs, free or not, as long as there is a graph.
    """

    def __init__(self, mode: Mode = "expandable", capacity: int | None = None) -> None:
        self._expandable = mode == "expandable"
        self._capacity = capacity
        self._free: defaultdict[Pool, _FreeBlocks] = defaultdict(_FreeBlocks)
        self._unmapped: defaultdict[Pool, dict[int, _Block]] = defaultdict(dict)
        self._live: dict[int, _Block] = {}
        self._next_address = 0
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0

    def reset_peak(self) -> None:
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def allocate(self, key: int, size: int, owner: Owner = "main") -> None:
        if size == 0:
            return
        size = _round_up(size, _SMALLEST)
        pool = owner, size <= _SMALL_LIMIT
        block = self._find(size, pool) or self._grow(size, pool)
        if block is None:
            self.empty_cache()
            block = self._grow(size, pool)
        if block is None:
            raise DoesNotFitError(f"{size} bytes asked for, {self.reserved} of {self._capacity} reserved")
        self._free[pool].remove(block)
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
        self._free[block.pool].add(self._merge(block))

    def empty_cache(self) -> None:
        """Give every wholly free segment (expandable: page) back to the device."""
        for (owner, _), free in self._free.items():
            for block in free.everything() if owner != "graphs" else ():
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    free.remove(block)
                    self.reserved -= block.size

    def _find(self, size: int, pool: Pool) -> _Block | None:
        candidates = self._free[pool].at_least(size)
        best = next(candidates, None)
        if best is None or not self._expandable:
            return best
        # A block before unmapped addresses counts with what it could grow to, so that holes are filled first.
        for block in candidates:
            if _growable_size(block) >= _growable_size(best):
                break
            best = block
        return best

    def _grow(self, size: int, pool: Pool) -> _Block | None:
        """A free block of at least `size`, in the free list, from memory the device hands out now."""
        segment = _segment_size(size)
        if self._capacity is not None and self.reserved + segment > self._capacity:
            return None
        if self._expandable:
            block = self._extend(size, pool)
        else:
            block = _Block(self._next_address, segment, pool)
            self._next_address += segment
            self._free[pool].add(block)
            self._reserve(segment)
        return block

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _extend(self, size: int, pool: Pool) -> _Block:
        block = self._room(size, pool)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            after = block.after
            if after is None or after.mapped:
                raise AssertionError("a free run ends before the bytes it was chosen for")
            block = self._map(after, min(size - block.size, after.size))
        return block

    def _room(self, size: int, pool: Pool) -> _Block:
        """The first unmapped block, or the free block before it, from where `size` bytes can become one block."""
        for address in sorted(self._unmapped[pool]):
            block = self._unmapped[pool][address]
            if block.before is not None and block.before.free:
                block = block.before
            if _free_run(block) >= size:
                return block
        block = _Block(self._next_address, _ADDRESS_SPACE, pool, mapped=False)
        self._next_address += _ADDRESS_SPACE
        self._unmapped[pool][block.address] = block
        return block

    def _map(self, block: _Block, size: int) -> _Block:
        """Map whole pages from the start of an unmapped block; returns the free block they end up in."""
        del self._unmapped[block.pool][block.address]
        size = _round_up(size, _SMALL_SEGMENT if block.is_small else LARGE_SEGMENT)
        if size < block.size:
            rest = _cut(block, size)
            self._unmapped[block.pool][rest.address] = rest
        block.mapped = True
        self._reserve(size)
        block = self._merge(block)
        self._free[block.pool].add(block)
        return block

    def _unmap(self, block: _Block) -> None:
        page = _SMALL_SEGMENT if block.is_small else LARGE_SEGMENT
        first = _round_up(block.address, page)
        size = (block.address + block.size) // page * page - first
        if size <= 0:
            return
        free = self._free[block.pool]
        free.remove(block)
        if first > block.address:
            block, head = _cut(block, first - block.address), block
            free.add(head)
        if size < block.size:
            free.add(_cut(block, size))
        block.mapped = False
        self.reserved -= size
        block = self._merge(block)
        self._unmapped[block.pool][block.address] = block

    def _split(self, block: _Block, size: int) -> None:
        rest = block.size - size
        if rest >= _SMALLEST if block.is_small or self._expandable else rest > _SMALL_LIMIT:
            self._free[block.pool].add(_cut(block, size))

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
            self._free[block.pool].remove(block)
        else:
            del self._unmapped[block.pool][block.address]


def _cut(block: _Block, size: int) -> _Block:
    """Shorten a block to `size`; returns the rest, linked behind it and in no list."""
    rest = _Block(block.address + size, block.size - size, block.pool, mapped=block.mapped)
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
    return LARGE_SEGMENT if size < _OWN_SEGMENT else _round_up(size, _SEGMENT_STEP)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
