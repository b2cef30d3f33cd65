"""Attention of each sequence's newest token in one kernel: it is rotated, stored and attends to what came before it.

The kernel is in `newest_triton.py`; `rotate_and_store` followed by `fused_paged_attention` is the same in more steps.
Shapes: S sequences, H heads, K key-value heads, d head size.
"""

from __future__ import annotations

from torch import Tensor

from ullage.model.kernels.fused import Turn
from ullage.model.kernels.operator import operator
from ullage.model.kernels.paged import merge_partials, new_partials, own_segments


def attend_newest(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    turn: Turn,
    arena: Tensor,
    layer: int,
    places: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scaling: float,
    window: int,
) -> Tensor:
    """[S, H, d] of the projections of one token for each sequence, [S, heads * d], whose rows may lie apart.

    `lengths` [S] count the tokens of each, the new one included; a sequence of length 0 stores nothing and gets zeros.
    """
    segments = own_segments(arena, page_table, window)
    rows = query.unflatten(1, (-1, arena.shape[5]))  # a view, for its shape
    tables, kinds = (arena, layer, places, page_table, lengths), (scaling, window)
    if segments == 1:
        out = query.new_empty(rows.shape)
        attend_newest_(query, key, value, *turn, *tables, out, None, None, *kinds)
        return out
    partial, sums = new_partials(rows, segments)
    attend_newest_(query, key, value, *turn, *tables, None, partial, sums, *kinds)
    return merge_partials(partial, sums, lengths, None, None, segments, window, query.dtype)


@operator("ullage::attend_newest", mutates_args=("arena", "out", "partial", "sums"))
def attend_newest_(
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
    """Fill `out` where every sequence is one segment, else `partial` and `sums`."""
    from ullage.model.kernels.newest_triton import attend_newest_into  # a trace needs only shapes

    attend_newest_into(
        query, key, value, cos, sin, query_norm, key_norm, eps, arena, layer,
        places, page_table, lengths, out, partial, sums, scaling, window,
    )  # fmt: skip
