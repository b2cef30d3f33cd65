"""The kernels of `kernels/fused.py`: one program for a row, for a stretch of one, or for one head of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

GATE_BLOCK = 1024
FUSION = False
"""Multiply-adds in bfloat16 would not round the products of a rotation, which `transformers` does."""


@triton.jit
def _add_norm(  # noqa: ANN202 -- Triton's own types
    total, normed, x, residual, weight, eps, width, part_stride,  # noqa: ANN001
    block: tl.constexpr, parts: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    place = tl.arange(0, block)
    inside = place < width
    narrow = normed.dtype.element_ty
    wide = tl.load(x + row + place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        wide += tl.load(x + part * part_stride + row + place, mask=inside, other=0.0)
    if parts > 1:
        wide = wide.to(narrow).to(tl.float32)
    if adds:
        wide += tl.load(residual + row + place, mask=inside, other=0.0).to(tl.float32)
        added = wide.to(narrow)
        tl.store(total + row + place, added, mask=inside)
        wide = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    scaled = (wide * scale).to(narrow).to(tl.float32)
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + place, (w * scaled).to(narrow), mask=inside)


@triton.jit
def _gate(out, gated, up, gated_stride, up_stride, width, block: tl.constexpr):  # noqa: ANN001, ANN202
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = place < width
    g = tl.load(gated + row * gated_stride + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + place, mask=inside, other=0.0).to(tl.float32)
    narrow = out.dtype.element_ty
    silu = (g * tl.sigmoid(g)).to(narrow).to(tl.float32)
    tl.store(out + row * width + place, (silu * u).to(narrow), mask=inside)


@triton.jit
def _rotate(  # noqa: ANN202
    source, target, c1, c2, s1, s2, weight, eps, place, inside,  # noqa: ANN001
    half: tl.constexpr, has_norm: tl.constexpr,
):  # fmt: skip
    narrow = target.dtype.element_ty
    first = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + place, mask=inside, other=0.0).to(tl.float32)
    if has_norm:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * half) + eps)
        w1 = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
        w2 = tl.load(weight + half + place, mask=inside, other=0.0).to(tl.float32)
        first = (w1 * (first * scale).to(narrow).to(tl.float32)).to(narrow).to(tl.float32)
        second = (w2 * (second * scale).to(narrow).to(tl.float32)).to(narrow).to(tl.float32)
    left = (first * c1).to(narrow).to(tl.float32) + (-second * s1).to(narrow).to(tl.float32)
    right = (second * c2).to(narrow).to(tl.float32) + (first * s2).to(narrow).to(tl.float32)
    tl.store(target + place, left.to(narrow), mask=inside)
    tl.store(target + half + place, right.to(narrow), mask=inside)


@triton.jit
def _rotate_and_store(  # noqa: ANN202
    out, keys, query, key, value, cos, sin, arena, places, query_norm, key_norm,  # noqa: ANN001
    eps, query_stride, key_stride, value_stride, kind_stride,  # noqa: ANN001
    groups: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr, block: tl.constexpr, has_norm: tl.constexpr,
    has_keys: tl.constexpr,
):  # fmt: skip
    # One token and one key-value head, with the heads of queries that read it.
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size = 2 * half
    place = tl.arange(0, block)
    inside = place < half
    turn = token * size + place
    c1 = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(cos + turn + half, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(sin + turn + half, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(groups):
        own = (head * groups + i) * size
        source, target = query + token * query_stride + own, out + token * (kv_heads * groups * size) + own
        _rotate(source, target, c1, c2, s1, s2, query_norm, eps, place, inside, half, has_norm)
    key += token * key_stride + head * size
    value += token * value_stride + head * size
    if has_keys:
        target = keys + (token * kv_heads + head) * size
        _rotate(key, target, c1, c2, s1, s2, key_norm, eps, place, inside, half, has_norm)
    spot = tl.load(places + token).to(tl.int64)
    if spot >= 0:  # else it is nobody's token
        slot = arena + (spot * kv_heads + head) * size
        _rotate(key, slot, c1, c2, s1, s2, key_norm, eps, place, inside, half, has_norm)
        slot += kind_stride
        tl.store(slot + place, tl.load(value + place, mask=inside), mask=inside)
        tl.store(slot + half + place, tl.load(value + half + place, mask=inside), mask=inside)


@triton.jit
def _rotations(  # noqa: ANN202
    cos, sin, positions, frequencies, scaling,  # noqa: ANN001
    half: tl.constexpr, block: tl.constexpr, exact: tl.constexpr,
):  # fmt: skip
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = place < half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + place, mask=inside, other=0.0)
    # Triton's own are instructions for small angles; the interpreter has no others.
    c = (libdevice.cos(angle) if exact else tl.cos(angle)) * scaling
    s = (libdevice.sin(angle) if exact else tl.sin(angle)) * scaling
    first = token * 2 * half + place
    narrow = cos.dtype.element_ty
    tl.store(cos + first, c.to(narrow), mask=inside)
    tl.store(cos + first + half, c.to(narrow), mask=inside)
    tl.store(sin + first, s.to(narrow), mask=inside)
    tl.store(sin + first + half, s.to(narrow), mask=inside)


def add_norm_into(
    total: Tensor | None, normed: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> None:
    """Without a residual, the norm alone. Parts of `x` are added up in their order."""
    rows, width = normed.shape
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        total, normed, x, residual, weight, eps, width, rows * width,
        block=block, parts=len(x) if x.dim() == 3 else 1, adds=residual is not None,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


def rotations_into(cos: Tensor, sin: Tensor, positions: Tensor, frequencies: Tensor, scaling: float) -> None:
    half = len(frequencies)
    _rotations[(len(positions),)](
        cos, sin, positions, frequencies, scaling,
        half=half, block=triton.next_power_of_2(half), exact=cos.is_cuda, num_warps=1,
    )  # fmt: skip


def gate_into(out: Tensor, gated: Tensor, up: Tensor) -> None:
    assert gated.stride(1) == up.stride(1) == 1, "the elements of a row lie side by side"
    rows, width = out.shape
    _gate[(rows, triton.cdiv(width, GATE_BLOCK))](
        out, gated, up, gated.stride(0), up.stride(0), width, block=GATE_BLOCK, num_warps=4
    )


def rotate_and_store_into(
    out: Tensor,
    keys: Tensor,
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
) -> None:
    """Both norms, or none: what architectures have. Keys [0, K, d] are not wanted."""
    assert query.stride(1) == key.stride(1) == value.stride(1) == 1, "the elements of a row lie side by side"
    assert all(x.is_contiguous() for x in (cos, sin)), "rows follow one another"
    tokens, heads, size = out.shape
    kv_heads, half = key.shape[1] // size, size // 2
    _rotate_and_store[(tokens, kv_heads)](
        # The layer by its address: its offset in a large arena needs more than 32 bits.
        out, keys if len(keys) else out, query, key, value, cos, sin, arena[layer], places,
        out if query_norm is None else query_norm, out if key_norm is None else key_norm,
        eps, query.stride(0), key.stride(0), value.stride(0), arena.stride(1),
        groups=heads // kv_heads, kv_heads=kv_heads, half=half, block=triton.next_power_of_2(half),
        has_norm=query_norm is not None, has_keys=len(keys) > 0, num_warps=1, enable_fp_fusion=FUSION,
    )  # fmt: skip
