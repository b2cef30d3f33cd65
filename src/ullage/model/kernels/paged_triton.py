"""The kernels of `kernels/paged.py`: a context in segments, the query heads of a key-value head as one tile, a merge.

How a context is divided follows from its own length alone, and a tile's size from the shape of a head: a sequence gets
the same numbers in any company. Scores are kept in powers of two, sums in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ullage.model.kernels.paged import LEAST_SEGMENT, PREFIX_SEGMENTS, SEGMENTS

TILE_ELEMENTS = 8192
"""Elements of the keys a program reads at once: 16 KiB, as many of the values."""
MOST_ROWS = 128
"""Query rows, at most, of a tile that reads a shared prompt."""
WARPS, STAGES = 4, 3
"""Half the warps for wide heads. Page numbers are loaded ahead of pages: 3 and 4 stages hold one tile, 5 and 6 two."""
SHARED_WARPS, SHARED_STAGES = 4, 3
"""Twice the warps for a tile of more than 64 rows."""
MERGE_WARPS = 2
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _segment_length(span, segments: tl.constexpr, least: tl.constexpr, tile: tl.constexpr):  # noqa: ANN001, ANN202 -- Triton's own types
    pieces = tl.minimum(tl.maximum(tl.cdiv(span, least), 1), segments)
    return tl.maximum(tl.cdiv(tl.cdiv(span, pieces), tile), 1) * tile  # whole tiles: only the last is cut


@triton.jit
def _own_start(sequence, length, starts, window: tl.constexpr, has_starts: tl.constexpr):  # noqa: ANN001, ANN202
    """The first token that a sequence reads for itself."""
    first = tl.maximum(length - window, 0) if window > 0 else length * 0
    if has_starts:
        first = tl.maximum(first, tl.load(starts + sequence).to(tl.int32))
    return first


@triton.jit
def _attended(  # noqa: ANN202
    q, keys, values, table, position, end, seen, kv_head, m, s, acc, scaling, cap,  # noqa: ANN001
    kv_heads: tl.constexpr, size: tl.constexpr, columns: tl.constexpr, page: tl.constexpr, has_cap: tl.constexpr,
):  # fmt: skip
    """Largest score, sum and weighted values after one more tile of tokens; `seen` is [rows or 1, tile]."""
    column = tl.arange(0, columns)
    read = position < end
    number = tl.load(table + position // page, mask=read, other=0).to(tl.int64)
    slot = (number * page + position % page) * kv_heads + kv_head
    address = slot[:, None] * size + column[None, :]
    inside = read[:, None] & (column < size)[None, :]  # what nobody has written is never read
    k = tl.load(keys + address, mask=inside, other=0.0)
    v = tl.load(values + address, mask=inside, other=0.0)
    scores = tl.dot(q, tl.trans(k)) * scaling
    if has_cap:
        # tanh by its exponential: 2 sigmoid(2x) - 1
        scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
    scores = tl.where(seen, scores * LOG2_E, -float("inf"))
    new = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen nothing yet
    shrink = tl.exp2(m - base)
    p = tl.exp2(scores - base[:, None])
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
    return new, s * shrink + tl.sum(p, 1), acc


@triton.jit
def _leave(  # noqa: ANN202
    m, s, acc, out, partial, largest, total, sinks, spot, head, real, inside, column,  # noqa: ANN001
    size: tl.constexpr, has_sinks: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """What a segment leaves: its part of a merge or, where it is the only one, the result."""
    place = spot[:, None] * size + column
    if at_once:
        # As `_merge` computes it of one segment, bit for bit.
        most = m
        if has_sinks:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
            most = tl.maximum(m, sink)
        weight = tl.where(s > 0, tl.exp2(m - most), 0.0)
        mass = tl.where(s > 0, s * weight, 0.0)
        if has_sinks:
            mass = mass + tl.exp2(sink - most)
        acc = acc * weight[:, None] / tl.where(mass > 0, mass, 1.0)[:, None]
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(partial + place, acc, mask=inside)
        tl.store(largest + spot, m, mask=real)
        tl.store(total + spot, s, mask=real)


@triton.jit
def _own(  # noqa: ANN202
    query, keys, values, page_table, lengths, starts, partial, largest, total, sinks, out,  # noqa: ANN001
    sequence_stride, head_stride, table_stride, scaling, cap,  # noqa: ANN001
    kv_heads: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, size: tl.constexpr, columns: tl.constexpr,
    page: tl.constexpr, before: tl.constexpr, segments: tl.constexpr, least: tl.constexpr, tile: tl.constexpr,
    window: tl.constexpr, has_starts: tl.constexpr, has_cap: tl.constexpr, has_sinks: tl.constexpr,
    at_once: tl.constexpr,
):  # fmt: skip
    kv_head, sequence, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    first = _own_start(sequence, length, starts, window, has_starts)
    share = _segment_length(length - first, segments, least, tile)
    begin = first + segment * share
    end = tl.minimum(begin + share, length)
    if at_once or begin < end:  # what is at once is zero where there is nothing
        row, column = tl.arange(0, rows), tl.arange(0, columns)
        real, head = row < group, kv_head * group + row
        inside = real[:, None] & (column < size)[None, :]
        place = sequence * sequence_stride + head[:, None] * head_stride + column[None, :]
        q = tl.load(query + place, mask=inside, other=0.0)
        m = tl.full([rows], -float("inf"), tl.float32)
        s = tl.zeros([rows], tl.float32)
        acc = tl.zeros([rows, columns], tl.float32)
        for start in range(begin, end, tile):
            position = start + tl.arange(0, tile)
            seen = (position < end)[None, :]
            m, s, acc = _attended(
                q, keys, values, page_table + sequence * table_stride, position, end, seen, kv_head,
                m, s, acc, scaling, cap, kv_heads, size, columns, page, has_cap,
            )  # fmt: skip
        spot = (sequence * kv_heads * group + head) * (before + segments) + before + segment
        _leave(
            m, s, acc, out, partial, largest, total, sinks, spot, head, real, inside, column[None, :],
            size, has_sinks, at_once,
        )  # fmt: skip


@triton.jit
def _shared(  # noqa: ANN202
    query, keys, values, page_table, lengths, starts, members, partial, largest, total,  # noqa: ANN001
    sequence_stride, head_stride, table_stride, most_members, scaling, cap,  # noqa: ANN001
    kv_heads: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, size: tl.constexpr, columns: tl.constexpr,
    page: tl.constexpr, segments: tl.constexpr, after: tl.constexpr, least: tl.constexpr, tile: tl.constexpr,
    window: tl.constexpr, has_cap: tl.constexpr,
):  # fmt: skip
    kv_head, block = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    number, segment = tl.program_id(1), tl.program_id(2)
    leader = tl.load(members + number * most_members).to(tl.int64)
    prompt = tl.load(starts + leader, mask=leader >= 0, other=0).to(tl.int32)
    share = _segment_length(prompt, segments, least, tile)
    begin = segment * share
    end = tl.minimum(begin + share, prompt)
    if begin < end:
        row, column = block * rows + tl.arange(0, rows), tl.arange(0, columns)
        member, head = row // group, kv_head * group + row % group
        sequence = tl.load(members + number * most_members + member, mask=member < most_members, other=-1).to(tl.int64)
        real = sequence >= 0
        inside = real[:, None] & (column < size)[None, :]
        place = (sequence * sequence_stride + head * head_stride)[:, None] + column[None, :]
        q = tl.load(query + place, mask=inside, other=0.0)
        length = tl.load(lengths + sequence, mask=real, other=0).to(tl.int32)
        first = tl.maximum(length - window, 0) if window > 0 else length * 0
        m = tl.full([rows], -float("inf"), tl.float32)
        s = tl.zeros([rows], tl.float32)
        acc = tl.zeros([rows, columns], tl.float32)
        for start in range(begin, end, tile):
            position = start + tl.arange(0, tile)
            seen = (position < end)[None, :] & (position[None, :] >= first[:, None])
            m, s, acc = _attended(
                q, keys, values, page_table + leader * table_stride, position, end, seen, kv_head,
                m, s, acc, scaling, cap, kv_heads, size, columns, page, has_cap,
            )  # fmt: skip
        spot = (sequence * kv_heads * group + head) * (segments + after) + segment
        _leave(
            m, s, acc, partial, partial, largest, total, partial, spot, head, real, inside, column[None, :],
            size, False, False,
        )  # fmt: skip


@triton.jit
def _merge(  # noqa: ANN202
    partial, largest, total, lengths, starts, sinks, out,  # noqa: ANN001
    size: tl.constexpr, columns: tl.constexpr, before: tl.constexpr, segments: tl.constexpr, shared: tl.constexpr,
    slots: tl.constexpr, least: tl.constexpr, tile: tl.constexpr, window: tl.constexpr, has_starts: tl.constexpr,
    has_sinks: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = sequence * tl.num_programs(0) + head
    length = tl.load(lengths + sequence).to(tl.int32)
    span = length - _own_start(sequence, length, starts, window, has_starts)
    # However few there may be, a segment is always added up at the same place: the order of a sum is part of its bits.
    slot, column = tl.arange(0, slots), tl.arange(0, columns)
    own = slot - shared
    used = (own >= 0) & (own < segments) & (own * _segment_length(span, segments, least, tile) < span)
    if has_starts:
        prompt = tl.load(starts + sequence).to(tl.int32)
        used = used | ((slot < before) & (slot * _segment_length(prompt, before, least, tile) < prompt))
    spot = row * (before + segments) + tl.where(own < 0, slot, before + own)
    m = tl.load(largest + spot, mask=used, other=-float("inf"))
    s = tl.load(total + spot, mask=used, other=0.0)
    most = tl.max(m, 0)
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        most = tl.maximum(most, sink)
    weight = tl.where(s > 0, tl.exp2(m - most), 0.0)
    mass = tl.sum(s * weight, 0)
    if has_sinks:
        mass = mass + tl.exp2(sink - most)
    inside = used[:, None] & (column < size)[None, :]
    acc = tl.load(partial + spot[:, None] * size + column[None, :], mask=inside, other=0.0)
    merged = tl.sum(acc * weight[:, None], 0) / tl.where(mass > 0, mass, 1.0)
    tl.store(out + row * size + column, merged.to(out.dtype.element_ty), mask=column < size)


@triton.jit
def _store(  # noqa: ANN202
    keys, values, key, value, places,  # noqa: ANN001
    key_stride, key_head_stride, value_stride, value_head_stride,  # noqa: ANN001
    size: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places + token).to(tl.int64)
    element = tl.arange(0, block)
    inside = element < width
    head, column = element // size, element % size
    if place >= 0:
        k = tl.load(key + token * key_stride + head * key_head_stride + column, mask=inside)
        v = tl.load(value + token * value_stride + head * value_head_stride + column, mask=inside)
        tl.store(keys + place * width + element, k, mask=inside)
        tl.store(values + place * width + element, v, mask=inside)


def attend_at_once(
    query: Tensor,
    layer: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> None:
    _launch_own(query, layer, page_table, lengths, None, None, None, sinks, out, 1, scaling, window, softcap)


def attend_own(
    query: Tensor,
    layer: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    partial: Tensor,
    sums: Tensor,
    segments: int,
    scaling: float,
    window: int,
    softcap: float,
) -> None:
    _launch_own(
        query, layer, page_table, lengths, starts, partial, sums, None, None, segments, scaling, window, softcap
    )


def _launch_own(
    query: Tensor,
    layer: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    partial: Tensor | None,
    sums: Tensor | None,
    sinks: Tensor | None,
    out: Tensor | None,
    segments: int,
    scaling: float,
    window: int,
    softcap: float,
) -> None:
    sequences, _, size = query.shape
    shape = _shape(query, layer)
    largest, total = (None, None) if sums is None else sums
    _own[(shape["kv_heads"], sequences, segments)](
        query, layer[0], layer[1], page_table, lengths, starts, partial, largest, total, sinks, out,
        query.stride(0), query.stride(1), page_table.stride(0), scaling, softcap or 1.0, **shape,
        rows=max(16, triton.next_power_of_2(shape["group"])),
        before=0 if partial is None else partial.shape[2] - segments, segments=segments, least=LEAST_SEGMENT,
        tile=tile_of(size), window=window, has_starts=starts is not None, has_cap=softcap != 0,
        has_sinks=sinks is not None, at_once=out is not None,
        num_warps=WARPS if size <= 64 else WARPS // 2, num_stages=STAGES,
    )  # fmt: skip


def attend_shared(
    query: Tensor,
    layer: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    members: Tensor,
    partial: Tensor,
    sums: Tensor,
    segments: int,
    scaling: float,
    window: int,
    softcap: float,
) -> None:
    size = query.shape[2]
    shape = _shape(query, layer)
    groups, most = members.shape
    all_rows = most * shape["group"]
    rows = min(MOST_ROWS, max(16, triton.next_power_of_2(all_rows)))
    _shared[(shape["kv_heads"] * triton.cdiv(all_rows, rows), groups, segments)](
        query, layer[0], layer[1], page_table, lengths, starts, members, partial, sums[0], sums[1],
        query.stride(0), query.stride(1), page_table.stride(0), most, scaling, softcap or 1.0, **shape,
        rows=rows, segments=segments, after=partial.shape[2] - segments, least=LEAST_SEGMENT, tile=tile_of(size),
        window=window, has_cap=softcap != 0, num_warps=SHARED_WARPS * (2 if rows > 64 else 1), num_stages=SHARED_STAGES,
    )  # fmt: skip


def merge(
    partial: Tensor,
    sums: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    sinks: Tensor | None,
    segments: int,
    window: int,
    out: Tensor,
) -> None:
    sequences, heads, slots, size = partial.shape
    shared = 0 if starts is None else PREFIX_SEGMENTS
    _merge[(heads, sequences)](
        partial, sums[0], sums[1], lengths, starts, sinks, out,
        size=size, columns=columns_of(size), before=slots - segments, segments=segments, shared=shared,
        slots=triton.next_power_of_2(shared + SEGMENTS), least=LEAST_SEGMENT, tile=tile_of(size), window=window,
        has_starts=starts is not None, has_sinks=sinks is not None, num_warps=MERGE_WARPS,
    )  # fmt: skip


def store(layer: Tensor, key: Tensor, value: Tensor, places: Tensor) -> None:
    tokens, kv_heads, size = key.shape
    assert key.stride(2) == value.stride(2) == 1, "the elements of a head lie side by side"
    width = kv_heads * size
    _store[(tokens,)](
        layer[0], layer[1], key, value, places, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        size=size, width=width, block=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def columns_of(size: int) -> int:
    """A power of two that products on tensor cores can have."""
    columns: int = max(16, triton.next_power_of_2(size))
    return columns


def tile_of(size: int) -> int:
    """Tokens that are read at once."""
    tokens: int = max(16, TILE_ELEMENTS // columns_of(size))
    return tokens


def _shape(query: Tensor, layer: Tensor) -> dict[str, int]:
    """What kernels are compiled for."""
    assert query.stride(2) == 1, "the elements of a head lie side by side"
    _, _, page, kv_heads, size = layer.shape
    return {
        "kv_heads": kv_heads,
        "group": query.shape[1] // kv_heads,
        "size": size,
        "columns": columns_of(size),
        "page": page,
    }
