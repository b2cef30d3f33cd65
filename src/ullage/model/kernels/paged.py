"""Paged KV: store new keys and values into the arena, and attend one query token per sequence over its pages.

Arena layout: [layers, 2, pages, page_size, kv_heads, head_dim]. A sequence's tokens live in the pages its row of the
page table names, in order. `store_kv` and `paged_attention` are plain torch for every device; their `fused_`
counterparts run the kernels of `paged_triton.py` (half precision on CUDA), with no host reads and grids that follow
from shapes alone, so that a CUDA graph can hold them. Shapes: S sequences, H heads, d head size, G groups, M members.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ullage.model.kernels.operator import operator

SEGMENTS = 16
"""Pieces, at most, that the context a sequence has of its own is divided into."""
PREFIX_SEGMENTS = 8
"""Pieces, at most, that a shared prompt is divided into."""
LEAST_SEGMENT = 512
"""Tokens that are worth a segment of their own: each writes and reads back 4 bytes a query head and head element."""


@operator("ullage::store_kv", mutates_args=("arena",))
def store_kv(arena: Tensor, layer: int, key: Tensor, value: Tensor, places: Tensor) -> None:
    """Write token t's key and value [t, kv_heads, head_dim] at place `page * page_size + offset` of a layer."""
    flat = arena[layer].flatten(1, 2)  # [2, pages * page_size, kv_heads, head_dim]
    flat[0].index_copy_(0, places, key)
    flat[1].index_copy_(0, places, value)


@operator("ullage::fused_store_kv", mutates_args=("arena",))
def fused_store_kv(arena: Tensor, layer: int, key: Tensor, value: Tensor, places: Tensor) -> None:
    """As `store_kv`; a token whose place is negative is not stored."""
    from ullage.model.kernels.paged_triton import store  # a trace needs only shapes

    store(arena[layer], key, value, places)


@operator("ullage::paged_attention")
def paged_attention(
    query: Tensor,
    arena: Tensor,
    layer: int,
    page_table: Tensor,
    lengths: Tensor,
    scaling: float,
    window: int,
    wide: bool,
) -> Tensor:
    """Attention of one new token per sequence, query [S, heads, head_dim], over its `lengths` [S] cached tokens.

    `page_table` is [S, pages of the longest]; `window` limits how far back a token sees, 0 for no limit; `wide`
    computes in float64. A sequence of length 0 gets zeros.
    """
    gathered = arena[layer][:, page_table].flatten(2, 3)  # [2, S, tokens, kv_heads, head_dim], a copy
    place = torch.arange(gathered.shape[2], device=query.device)
    visible = place < lengths[:, None]
    if window:
        visible &= place >= lengths[:, None] - window
    # What nobody has written may be anything, and a NaN would survive a weight of zero.
    keys, values = gathered.masked_fill_(~visible[None, :, :, None, None], 0)
    narrow = query.dtype
    if wide:
        query, keys, values = query.double(), keys.double(), values.double()
    out = functional.scaled_dot_product_attention(
        query[:, :, None],
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible[:, None, None],
        scale=scaling,
        enable_gqa=True,
    )
    return out[:, :, 0].to(narrow).masked_fill(lengths[:, None, None] == 0, 0)


@paged_attention.register_fake
def _(
    query: Tensor,
    arena: Tensor,
    layer: int,
    page_table: Tensor,
    lengths: Tensor,
    scaling: float,
    window: int,
    wide: bool,
) -> Tensor:
    del arena, layer, page_table, lengths, scaling, window, wide
    return query.new_empty(query.shape)


def fused_paged_attention(
    query: Tensor,
    arena: Tensor,
    layer: int,
    page_table: Tensor,
    lengths: Tensor,
    scaling: float,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `paged_attention`; a soft cap of 0 is none, `sinks` [H] are logits that take probability and give nothing.

    A sequence is divided by its own length, so its numbers depend neither on the rest of the batch nor on how wide the
    table is; the table's width says how many segments the longest can have.
    """
    segments = own_segments(arena, page_table, window)
    if segments == 1:
        return attend_at_once(query, arena, layer, page_table, lengths, sinks, scaling, window, softcap)
    partial, sums = new_partials(query, segments)
    attend_own(query, arena, layer, page_table, lengths, None, partial, sums, segments, scaling, window, softcap)
    return merge_partials(partial, sums, lengths, None, sinks, segments, window, query.dtype)


def grouped_paged_attention(
    query: Tensor,
    arena: Tensor,
    layer: int,
    page_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    members: Tensor,
    scaling: float,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `fused_paged_attention`, but the pages that the samples of a group share are read once for all of them.

    `starts` [S]: the tokens at the beginning of each sequence that it shares, 0 for none. `members` [G, M]: the
    sequences of each group, -1 for none; those of a row share all their `starts`, and the first is there unless the
    row is empty. Every sequence with a start is a member of one row.
    """
    before = _most_segments(_longest(arena, page_table, 0), PREFIX_SEGMENTS)
    segments = own_segments(arena, page_table, window)
    partial, sums = new_partials(query, before + segments)
    rest = (scaling, window, softcap)
    attend_shared(query, arena, layer, page_table, lengths, starts, members, partial, sums, before, *rest)
    attend_own(query, arena, layer, page_table, lengths, starts, partial, sums, segments, *rest)
    return merge_partials(partial, sums, lengths, starts, sinks, segments, window, query.dtype)


def own_segments(arena: Tensor, page_table: Tensor, window: int) -> int:
    """Into how many the context of the longest sequence of this table is divided."""
    return _most_segments(_longest(arena, page_table, window), SEGMENTS)


def _longest(arena: Tensor, page_table: Tensor, window: int) -> int:
    """Tokens that a sequence of this table can see."""
    tokens = page_table.shape[1] * arena.shape[3]
    return min(tokens, window) if window else tokens


def _most_segments(tokens: int, most: int) -> int:
    """Into how many so many tokens, or fewer, are divided."""
    return min(most, max(1, -(-tokens // LEAST_SEGMENT)))


def new_partials(query: Tensor, segments: int) -> tuple[Tensor, Tensor]:
    """What segments leave to merge: weighted values [S, H, segments, d]; largest score and sum [2, S, H, segments]."""
    sequences, heads, size = query.shape
    partial = query.new_empty(sequences, heads, segments, size, dtype=torch.float32)
    return partial, query.new_empty(2, sequences, heads, segments, dtype=torch.float32)


@operator("ullage::attend_at_once")
def attend_at_once(
    query: Tensor,
    arena: Tensor,
    layer: int,
    page_table: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
) -> Tensor:
    """[S, H, d] where every sequence is one segment: nothing is left to merge."""
    from ullage.model.kernels.paged_triton import attend_at_once as launch

    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch(query, arena[layer], page_table, lengths, sinks, out, scaling, window, softcap)
    return out


@attend_at_once.register_fake
def _(
    query: Tensor,
    arena: Tensor,
    layer: int,
    page_table: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
) -> Tensor:
    del arena, layer, page_table, lengths, sinks, scaling, window, softcap
    return query.new_empty(query.shape)


@operator("ullage::attend_own", mutates_args=("partial", "sums"))
def attend_own(
    query: Tensor,
    arena: Tensor,
    layer: int,
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
    """Fill the last `segments` of `partial` and `sums` with attention over each sequence's tokens from its start on."""
    from ullage.model.kernels.paged_triton import attend_own as launch

    launch(query, arena[layer], page_table, lengths, starts, partial, sums, segments, scaling, window, softcap)


@operator("ullage::attend_shared", mutates_args=("partial", "sums"))
def attend_shared(
    query: Tensor,
    arena: Tensor,
    layer: int,
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
    """Fill the first `segments` of `partial` and `sums` with attention of each group over what it shares."""
    from ullage.model.kernels.paged_triton import attend_shared as launch

    launch(query, arena[layer], page_table, lengths, starts, members, partial, sums, segments, scaling, window, softcap)


@operator("ullage::merge_partials")
def merge_partials(
    partial: Tensor,
    sums: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    sinks: Tensor | None,
    segments: int,
    window: int,
    dtype: torch.dtype,
) -> Tensor:
    """[S, H, d] of the segments that a sequence has, its own the last `segments`; zeros for one of length 0."""
    from ullage.model.kernels.paged_triton import merge

    out = torch.empty(partial.shape[0], partial.shape[1], partial.shape[3], dtype=dtype, device=partial.device)
    merge(partial, sums, lengths, starts, sinks, segments, window, out)
    return out


@merge_partials.register_fake
def _(
    partial: Tensor,
    sums: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    sinks: Tensor | None,
    segments: int,
    window: int,
    dtype: torch.dtype,
) -> Tensor:
    del sums, lengths, starts, sinks, segments, window
    return partial.new_empty(partial.shape[0], partial.shape[1], partial.shape[3], dtype=dtype)
