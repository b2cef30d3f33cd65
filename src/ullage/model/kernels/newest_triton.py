"""The kernel of `kernels/newest.py`: one program for a segment of a sequence's context and one key-value head.

Each rotates the queries of its heads for itself. The one whose segment the newest token ends also rotates its key,
stores it with its value, and ends its sums with them instead of reading them back. Numbers are rounded where
`rotate_and_store` rounds them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ullage.model.kernels.fused_triton import FUSION
from ullage.model.kernels.paged import LEAST_SEGMENT
from ullage.model.kernels.paged_triton import (
    LOG2_E,
    STAGES,
    WARPS,
    _attended,
    _leave,
    _own_start,
    _segment_length,
    columns_of,
    tile_of,
)

NARROW_STAGES = 5
"""For heads of up to 64 and few of them: one warp, a quarter of a tile at a time, and two of those on their way."""


@triton.jit
def _turned(  # noqa: ANN202 -- Triton's own types
    x, y, weight, eps, cos, sin, column,  # noqa: ANN001
    size: tl.constexpr, has_norm: tl.constexpr,
):  # fmt: skip
    """Heads [rows, columns] after their norm and their rotation, in their own precision; `y` is their other halves."""
    half: tl.constexpr = size // 2
    other = tl.where(column < half, column + half, column - half)
    sign = tl.where(column < half, -1.0, 1.0)  # the second half is subtracted
    narrow = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if has_norm:
        scale = tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
        x_weight = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
        y_weight = tl.load(weight + other, mask=column < size, other=0.0).to(tl.float32)
        x = (x_weight * (x * scale).to(narrow).to(tl.float32)).to(narrow).to(tl.float32)
        y = (y_weight * (y * scale).to(narrow).to(tl.float32)).to(narrow).to(tl.float32)
    return ((x * cos).to(narrow).to(tl.float32) + (sign * y * sin).to(narrow).to(tl.float32)).to(narrow)


@triton.jit
def _with_one_more(q, k, v, here, m, s, acc, scaling):  # noqa: ANN001, ANN202
    """Largest score, sum and weighted values after one more token, if it is here."""
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * (scaling * LOG2_E)
    new = tl.where(here, tl.maximum(m, score), m)
    base = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen nothing
    shrink, p = tl.exp2(m - base), tl.where(here, tl.exp2(score - base), 0.0)
    return new, s * shrink + p, acc * shrink[:, None] + p[:, None] * v.to(tl.float32)


@triton.jit
def _newest(  # noqa: ANN202
    query, key, value, cosines, sines, query_norm, key_norm, eps,  # noqa: ANN001
    keys, values, places, page_table, lengths, out, partial, largest, total,  # noqa: ANN001
    query_stride, key_stride, value_stride, table_stride, scaling,  # noqa: ANN001
    kv_heads: tl.constexpr, group: tl.constexpr, rows: tl.constexpr, size: tl.constexpr, columns: tl.constexpr,
    page: tl.constexpr, segments: tl.constexpr, least: tl.constexpr, tile: tl.constexpr, at_a_time: tl.constexpr,
    window: tl.constexpr, has_norm: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    kv_head, sequence, segment = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    first = _own_start(sequence, length, lengths, window, False)
    share = _segment_length(length - first, segments, least, tile)
    begin = first + segment * share
    end = tl.minimum(begin + share, length)
    if at_once or begin < end:  # what is at once is zero where there is nothing
        row, column = tl.arange(0, rows), tl.arange(0, columns)[None, :]
        real, head, wide = row < group, kv_head * group + row, column < size
        inside = real[:, None] & wide
        other = tl.where(column < size // 2, column + size // 2, column - size // 2)
        cos = tl.load(cosines + sequence * size + column, mask=wide, other=0.0).to(tl.float32)
        sin = tl.load(sines + sequence * size + column, mask=wide, other=0.0).to(tl.float32)
        source = query + sequence * query_stride + head[:, None] * size
        x = tl.load(source + column, mask=inside, other=0.0)
        y = tl.load(source + other, mask=inside, other=0.0)
        # The newest token, if it is in this segment: on its way while older ones are read.
        here = (end == length) & (length > 0)
        new = tl.where(here, column, size) < size
        row_of_keys = key + sequence * key_stride + kv_head * size
        key_x = tl.load(row_of_keys + column, mask=new, other=0.0)
        key_y = tl.load(row_of_keys + other, mask=new, other=0.0)
        v = tl.load(value + sequence * value_stride + kv_head * size + column, mask=new, other=0.0)
        place = tl.load(places + sequence).to(tl.int64)
        q = _turned(x, y, query_norm, eps, cos, sin, column, size, has_norm)
        m = tl.full([rows], -float("inf"), tl.float32)
        s = tl.zeros([rows], tl.float32)
        acc = tl.zeros([rows, columns], tl.float32)
        before = tl.minimum(end, length - 1)
        for start in range(begin, before, at_a_time):
            position = start + tl.arange(0, at_a_time)
            seen = (position < before)[None, :]
            m, s, acc = _attended(
                q, keys, values, page_table + sequence * table_stride, position, before, seen, kv_head,
                m, s, acc, scaling, 1.0, kv_heads, size, columns, page, False,
            )  # fmt: skip
        k = _turned(key_x, key_y, key_norm, eps, cos, sin, column, size, has_norm)
        slot = (place * kv_heads + kv_head) * size + column
        tl.store(keys + slot, k, mask=new)
        tl.store(values + slot, v, mask=new)
        m, s, acc = _with_one_more(q, k, v, here, m, s, acc, scaling)
        spot = (sequence * kv_heads * group + head) * segments + segment
        _leave(
            m, s, acc, out, partial, largest, total, out, spot, head, real, inside, column, size, False, at_once
        )  # fmt: skip


def attend_newest_into(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    arena: Tensor,
    layer: int,
    places: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    out: Tensor | None,
    partial: Tensor | None,
    sums: Tensor | None,
    scaling: float,
    window: int,
) -> None:
    """Both norms, or none: what architectures have."""
    assert query.stride(1) == key.stride(1) == value.stride(1) == 1, "the elements of a row lie side by side"
    assert all(x.is_contiguous() for x in (cos, sin)), "rows follow one another"
    _, _, _, page, kv_heads, size = arena.shape
    segments = 1 if partial is None else partial.shape[2]
    group = query.shape[1] // (kv_heads * size)
    largest, total = (None, None) if sums is None else sums
    keys, values = arena[layer]  # by its address: its offset in a large arena needs more than 32 bits
    rows, tile = max(16, triton.next_power_of_2(group)), tile_of(size)
    narrow = size <= 64 and rows == 16
    _newest[(kv_heads, len(query), segments)](
        query, key, value, cos, sin, query_norm, key_norm, eps,
        keys, values, places, page_table, lengths, out, partial, largest, total,
        query.stride(0), key.stride(0), value.stride(0), page_table.stride(0), scaling,
        kv_heads=kv_heads, group=group, rows=rows, size=size,
        columns=columns_of(size), page=page, segments=segments, least=LEAST_SEGMENT, tile=tile,
        at_a_time=max(16, tile // 4) if narrow else tile, window=window, has_norm=query_norm is not None,
        at_once=out is not None, num_warps=1 if narrow else WARPS // 2, num_stages=NARROW_STAGES if narrow else STAGES,
        enable_fp_fusion=FUSION,
    )  # fmt: skip
