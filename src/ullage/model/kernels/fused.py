"""What lies between a decoder's matrix products as few operators: norms, rotary embeddings, the gate of the MLP.

Numbers are rounded where the layers of `transformers` round them, so that an engine on these and a trainer on those
differ by the order of sums alone. The kernels are in `fused_triton.py`. Shapes: S tokens, D hidden, H heads,
K key-value heads, d head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ullage.model.kernels.operator import operator


class Turn(NamedTuple):
    """What makes queries and keys of a layer's projections."""

    cos: Tensor
    """[S, d], as `sin`"""
    sin: Tensor
    query_norm: Tensor | None
    """[d], for each head before it is rotated; both norms, or none."""
    key_norm: Tensor | None
    eps: float


@operator("ullage::add_norm")
def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + residual` [S, D], and its root-mean-square norm; `x` may come in parts, [P, S, D] in float32."""
    if x.device.type == "cpu":
        total = (x if x.dim() == 2 else x.sum(0).to(residual.dtype)) + residual
        return total, norm_plain(total, weight, eps)
    from ullage.model.kernels.fused_triton import add_norm_into  # a trace needs only shapes

    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    add_norm_into(total, normed, x, residual, weight, eps)
    return total, normed


@add_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    del x, weight, eps
    return torch.empty_like(residual), torch.empty_like(residual)


@operator("ullage::norm")
def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The root-mean-square norm of [S, D]."""
    if x.device.type == "cpu":
        return norm_plain(x, weight, eps)
    from ullage.model.kernels.fused_triton import add_norm_into

    normed = torch.empty_like(x)
    add_norm_into(None, normed, x, None, weight, eps)
    return normed


@norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    del weight, eps
    return torch.empty_like(x)


@operator("ullage::rotations")
def rotations(positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [S, d] of positions [S] times frequencies [d / 2], for both halves of a head alike."""
    if positions.device.type == "cpu":
        angles = (positions[:, None].float() * frequencies).repeat(1, 2)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
    from ullage.model.kernels.fused_triton import rotations_into

    cos, sin = _rotations_like(positions, frequencies, dtype)
    rotations_into(cos, sin, positions, frequencies, scaling)
    return cos, sin


@rotations.register_fake
def _(positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    del scaling
    return _rotations_like(positions, frequencies, dtype)


def _rotations_like(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = len(positions), 2 * len(frequencies)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


@operator("ullage::gate")
def gate(gated: Tensor, up: Tensor) -> Tensor:
    """`silu(gated) * up`; rows may lie apart."""
    if gated.device.type == "cpu":
        return functional.silu(gated) * up
    from ullage.model.kernels.fused_triton import gate_into

    out = up.new_empty(up.shape)
    gate_into(out, gated, up)
    return out


@gate.register_fake
def _(gated: Tensor, up: Tensor) -> Tensor:
    del gated
    return up.new_empty(up.shape)


@operator("ullage::rotate_and_store", mutates_args=("arena",))
def rotate_and_store(
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
    keeps_keys: bool,
) -> tuple[Tensor, Tensor]:
    """Rotated queries [S, H, d] and, if asked for, keys [S, K, d], else [0, K, d].

    Rotated keys, and values, go to their places in a layer of the arena.

    Queries, keys and values are the projections, [S, heads * d], whose rows may lie apart; a norm of queries or keys is
    applied to every head. A token whose place is negative is nobody's: its key and value are not stored.
    """
    if query.device.type == "cpu":
        query, key, value = (x.unflatten(1, (-1, cos.shape[1])) for x in (query, key, value))
        flat, there = arena[layer].flatten(1, 2), places >= 0  # [2, pages * page_size, K, d]
        key = rotated_plain(key, cos, sin, key_norm, eps)
        flat[0].index_copy_(0, places[there], key[there])
        flat[1].index_copy_(0, places[there], value[there])
        return rotated_plain(query, cos, sin, query_norm, eps), key if keeps_keys else key.new_empty(0, *key.shape[1:])
    from ullage.model.kernels.fused_triton import rotate_and_store_into

    out, keys = _rotated_like(query, key, cos.shape[1], keeps_keys)
    rotate_and_store_into(out, keys, query, key, value, cos, sin, query_norm, key_norm, eps, arena, layer, places)
    return out, keys


@rotate_and_store.register_fake
def _(
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
    keeps_keys: bool,
) -> tuple[Tensor, Tensor]:
    del value, sin, arena, layer, places, query_norm, key_norm, eps
    return _rotated_like(query, key, cos.shape[1], keeps_keys)


def _rotated_like(query: Tensor, key: Tensor, size: int, keeps_keys: bool) -> tuple[Tensor, Tensor]:
    tokens, heads, kv_heads = query.shape[0], query.shape[1] // size, key.shape[1] // size
    return query.new_empty(tokens, heads, size), key.new_empty(tokens if keeps_keys else 0, kv_heads, size)


def norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension, in float32 but for the weight."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rotated_plain(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """[S, heads, d] after its norm, if it has one; the two halves of a head are the parts of complex numbers."""
    if weight is not None:
        x = norm_plain(x, weight, eps)
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
