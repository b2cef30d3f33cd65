"""Paged KV: store new keys and values into the arena, and attend one query token per sequence over its pages.

Arena layout: [layers, 2, pages, page_size, kv_heads, head_dim]. A sequence's tokens live in the pages its row of the
page table names, in order. Plain torch for every device; a fused CUDA kernel takes the same op's place.
"""

import torch
from torch import Tensor
from torch.nn import functional


@torch.library.custom_op("ullage::store_kv", mutates_args=("arena",))
def store_kv(arena: Tensor, layer: int, key: Tensor, value: Tensor, places: Tensor) -> None:
    """Write token t's key and value [t, kv_heads, head_dim] at place `page * page_size + offset` of a layer."""
    flat = arena[layer].flatten(1, 2)  # [2, pages * page_size, kv_heads, head_dim]
    flat[0].index_copy_(0, places, key)
    flat[1].index_copy_(0, places, value)


@store_kv.register_fake
def _(arena: Tensor, layer: int, key: Tensor, value: Tensor, places: Tensor) -> None:
    del arena, layer, key, value, places


@torch.library.custom_op("ullage::paged_attention", mutates_args=())
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
    computes in float64.
    """
    keys, values = arena[layer][:, page_table].flatten(2, 3)  # [S, tokens, kv_heads, head_dim]
    narrow = query.dtype
    if wide:
        query, keys, values = query.double(), keys.double(), values.double()
    place = torch.arange(keys.shape[1], device=query.device)
    visible = place < lengths[:, None]
    if window:
        visible &= place >= lengths[:, None] - window
    out = functional.scaled_dot_product_attention(
        query[:, :, None],
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible[:, None, None],
        scale=scaling,
        enable_gqa=True,
    )
    return out[:, :, 0].to(narrow).contiguous()


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
    return torch.empty_like(query)
