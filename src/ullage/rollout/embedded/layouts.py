"""The engine's two attention layouts: prefill (packed prompts, cache filled on the way) and decode (cache read)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ullage.model.attention import Extras, PackedLayout, Span, masked_attention
from ullage.model.kernels.fused import Turn, rotate_and_store
from ullage.model.kernels.newest import attend_newest
from ullage.model.kernels.paged import (
    fused_paged_attention,
    fused_store_kv,
    grouped_paged_attention,
    paged_attention,
    store_kv,
)
from ullage.model.target import Target


class PrefillLayout(PackedLayout):
    """Causal attention over packed prompts; keys and values go to their places in the arena."""

    def __init__(self, spans: Sequence[Span], arena: Tensor, places: Tensor, target: Target) -> None:
        super().__init__(spans, target, arena.dtype)
        self.arena = arena
        self.places = places
        self.store = fused_store_kv if target.varlen_attention(arena.dtype) else store_kv

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        self.store(self.arena, layer, key.transpose(0, 1), value.transpose(0, 1), self.places)
        return super().attend(layer, query, key, value, extras)

    def attend_projected(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, turn: Turn, extras: Extras
    ) -> Tensor:
        """[T, H, d] of projections [T, heads * d]; keys and values are stored on the way."""
        query, keys = rotate_and_store(query, key, value, *turn, self.arena, layer, self.places, True)
        values = value.unflatten(1, keys.shape[1:])
        return super().attend(layer, query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), extras)


class Shared(NamedTuple):
    """Beginnings that sequences have in common, as `grouped_paged_attention` takes them."""

    starts: Tensor
    members: Tensor


class DecodeLayout:
    """One new token per sequence, attending over its pages."""

    def __init__(self, arena: Tensor, places: Tensor, page_table: Tensor, lengths: Tensor, target: Target) -> None:
        self.arena = arena
        self.fused = target.varlen_attention(arena.dtype)
        self.wide = target.wide_attention(arena.dtype)
        self.places = places
        """[S] where each new token's key and value go."""
        self.page_table = page_table
        """[S, pages]"""
        self.lengths = lengths
        """[S] cached tokens, the new one included."""
        self.shared: Shared | None = None
        """Read once for all that share them, by kernels of our own."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        new_key, new_value, rows = (x.transpose(0, 1) for x in (key, value, query))  # [S, heads, d]
        store = fused_store_kv if self.fused else store_kv
        store(self.arena, layer, new_key, new_value, self.places)
        return self.read(layer, rows, extras)

    def attend_projected(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, turn: Turn, extras: Extras
    ) -> Tensor:
        """[S, H, d] of projections [S, heads * d]; keys and values are stored on the way."""
        if self.fused and self.shared is None:
            assert (extras.softcap, extras.sinks) == (None, None), "of no family whose layers are fused"
            tables = (self.places, self.page_table, self.lengths)
            rest = (extras.scaling, extras.window)
            return attend_newest(query, key, value, turn, self.arena, layer, *tables, *rest)
        rows, _ = rotate_and_store(query, key, value, *turn, self.arena, layer, self.places, False)
        return self.read(layer, rows, extras)

    def read(self, layer: int, rows: Tensor, extras: Extras) -> Tensor:
        """Attention of queries [S, H, d] over what is in the cache, the new tokens included."""
        if self.fused:
            rest = (extras.scaling, extras.window, extras.softcap or 0.0, extras.sinks)
            if self.shared is None:
                return fused_paged_attention(rows, self.arena, layer, self.page_table, self.lengths, *rest)
            starts, members = self.shared
            return grouped_paged_attention(
                rows, self.arena, layer, self.page_table, self.lengths, starts, members, *rest
            )
        if extras.softcap is None and extras.sinks is None:
            return paged_attention(
                rows, self.arena, layer, self.page_table, self.lengths, extras.scaling, extras.window, self.wide
            )
        keys, values = self.arena[layer][:, self.page_table].flatten(2, 3)
        place = torch.arange(keys.shape[1], device=rows.device)
        mask = place < self.lengths[:, None]
        # Where no token is, there may be anything, and 0 x NaN is NaN.
        keys, values = (x.masked_fill(~mask[:, :, None, None], 0) for x in (keys, values))
        if extras.window:
            mask &= place >= self.lengths[:, None] - extras.window
        dtype = rows.dtype
        if self.wide:
            rows, keys, values = rows.double(), keys.double(), values.double()
        out = masked_attention(
            rows[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), mask[:, None, None], extras
        )
        return out[:, :, 0].to(dtype)
