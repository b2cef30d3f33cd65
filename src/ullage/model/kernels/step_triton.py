"""The kernel of `kernels/step.py`: one program for a few blocks of elements.

Formulas and their order are those of `AdamW8bit` in `engine/rules.py`, every operation rounds once (IEEE division and
roots, no fused multiply-adds), and random bits are the same, so that results are the same bit for bit. A last bit may
differ from torch's fused AdamW, which orders the same formula otherwise; from plain SGD, which multiplies and adds with
one rounding; and from a CPU, whose roots are not always rounded correctly.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ullage.model.kernels.step import BLOCK, PERIOD

ROWS = 4
"""Blocks of one program: one for a warp, eight elements for a thread."""
WORDS = ["mean_first", "mean_second", "square_first", "square_second", "round_first", "round_second", "start"]
"""Numbers that differ from call to call: no kernel is compiled for any of them."""


@triton.jit
def _bits(place, first, second):  # noqa: ANN001, ANN202 -- Triton's own types
    # `Place.bits`: uniform whole numbers below 65536.
    x = (place + first).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + second.to(tl.uint32)) * 0x846CA68B
    return (x ^ (x >> 16)) & 0xFFFF


@triton.jit
def _power(root):  # noqa: ANN001, ANN202
    square = root * root
    return square * square


@triton.jit
def _decode(codes, scale, top: tl.constexpr):  # noqa: ANN001, ANN202
    share = _power(codes * (1.0 / top))
    return tl.where(codes < 0, -share, share) * scale[:, None]


@triton.jit
def _encode(size, bits, top: tl.constexpr):  # noqa: ANN001, ANN202
    # Sizes [rows, block] to codes without a sign, and the scale of each block.
    scale = tl.max(size, 1)
    share = tl.div_rn(size, tl.maximum(scale, 1.1754943508222875e-38)[:, None])  # the least normal number
    low = tl.minimum(tl.floor(tl.sqrt_rn(tl.sqrt_rn(share)) * top), top - 1.0)
    below = _power(low * (1.0 / top))
    odds = tl.div_rn(share - below, _power((low + 1.0) * (1.0 / top)) - below)
    drawn = (bits.to(tl.float32) + 0.5) * (1.0 / 65536)
    return tl.where(drawn < odds, low + 1.0, low), scale


@triton.jit(do_not_specialize=WORDS)
def _step(  # noqa: ANN202
    weights, gradient, master, mean, mean_scale, square, square_scale,  # noqa: ANN001
    count, scale, decay, rate, beta1, beta2, rest2, correction, eps,  # noqa: ANN001
    mean_first, mean_second, square_first, square_second, round_first, round_second, start,  # noqa: ANN001
    has_master: tl.constexpr, has_moments: tl.constexpr, in_8_bits: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr, period: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = row[:, None] * block + tl.arange(0, block)[None, :]
    inside, there = place < count, row * block < count
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * scale
    if has_master:
        work = tl.load(master + place, mask=inside, other=0.0)
    else:
        work = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    if has_moments:
        m = tl.load(mean + place, mask=inside, other=0).to(tl.float32)
        s = tl.load(square + place, mask=inside, other=0).to(tl.float32)
        if in_8_bits:
            m = _decode(m, tl.load(mean_scale + row, mask=there, other=0.0), 127.0)
            s = _decode(s, tl.load(square_scale + row, mask=there, other=0.0), 255.0)
        m = (m - g) * beta1 + g
        s = s * beta2 + g * g * rest2
        if in_8_bits:
            code, largest = _encode(tl.abs(m), _bits(place, mean_first, mean_second), 127.0)
            tl.store(mean_scale + row, largest, mask=there)
            tl.store(mean + place, tl.where(m < 0, -code, code).to(tl.int32).to(tl.int8), mask=inside)
            code, largest = _encode(s, _bits(place, square_first, square_second), 255.0)
            tl.store(square_scale + row, largest, mask=there)
            # Only zero becomes zero: an update divides by the root of these numbers.
            code = tl.where(s > 0, tl.maximum(code, 1.0), 0.0)
            tl.store(square + place, code.to(tl.int32).to(tl.uint8), mask=inside)
        else:
            tl.store(mean + place, m, mask=inside)
            tl.store(square + place, s, mask=inside)
        root = tl.sqrt_rn(s * correction) + eps
        change = tl.div_rn(m, root) * rate
    else:
        change = g * rate
    work = work * decay - change
    spot = place
    if has_master:
        tl.store(master + place, work, mask=inside)
        spot = (place + start) % period
    # The 16 bits to be lost meet 16 others.
    bits = work.to(tl.int32, bitcast=True) + _bits(spot, round_first, round_second).to(tl.int32)
    lifted = tl.where(work == work, (bits & -65536).to(tl.float32, bitcast=True), work)  # CUDA's NaN has all bits set
    tl.store(weights + place, lifted.to(tl.bfloat16), mask=inside)


def step_into(
    weights: Tensor,
    gradient: Tensor,
    master: Tensor | None,
    mean: Tensor | None,
    mean_scale: Tensor | None,
    square: Tensor | None,
    square_scale: Tensor | None,
    scale: float,
    decay: float,
    rate: float,
    betas: Sequence[float],
    correction: float,
    eps: float,
    words: Sequence[int],
    start: int,
) -> None:
    beta1, beta2 = betas
    owned = (master, mean, mean_scale, square, square_scale)
    assert all(tensor is None or tensor.is_contiguous() for tensor in (weights, gradient, *owned)), "no gaps"
    _step[(triton.cdiv(len(weights), ROWS * BLOCK),)](
        weights, gradient, *(weights if tensor is None else tensor for tensor in owned),
        len(weights), scale, decay, rate, beta1, beta2, 1 - beta2, correction, eps, *words, start,
        has_master=master is not None, has_moments=mean is not None, in_8_bits=mean_scale is not None,
        rows=ROWS, block=BLOCK, period=PERIOD, num_warps=ROWS, enable_fp_fusion=False,
    )  # fmt: skip
