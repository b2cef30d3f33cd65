"""The kernel of `kernels/nf4.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Blocks of one program."""


@triton.jit
def _dequantise(  # noqa: ANN202 -- Triton's own types
    codes, absmax, nested_absmax, offset, values, nested_values, out,  # noqa: ANN001
    size, bytes_, blocks,  # noqa: ANN001
    rows: tl.constexpr, half: tl.constexpr, nested: tl.constexpr,
):  # fmt: skip
    # `half`: bytes of a block; `nested`: blocks that share a scale of their own.
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    known = block < blocks
    place = tl.load(absmax + block, mask=known, other=0).to(tl.int32)
    largest = tl.load(nested_absmax + block // nested, mask=known, other=0.0)
    scale = tl.load(nested_values + place) * largest + tl.load(offset)
    byte = block[:, None] * half + tl.arange(0, half)[None, :]
    pair = tl.load(codes + byte, mask=byte < bytes_, other=0).to(tl.int32)
    first, second = tl.load(values + (pair >> 4)), tl.load(values + (pair & 15))
    weights = tl.interleave(first, second) * scale[:, None]
    weight = block[:, None] * (2 * half) + tl.arange(0, 2 * half)[None, :]
    tl.store(out + weight, weights.to(out.dtype.element_ty), mask=weight < size)


def dequantise(
    codes: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor,
    offset: Tensor,
    values: Tensor,
    nested_values: Tensor,
    out: Tensor,
) -> None:
    """Fill `out` with the weights that the codes stand for."""
    blocks = len(absmax)
    # Without fused multiply-adds the scales are those of the plain twin, bit for bit.
    _dequantise[(triton.cdiv(blocks, ROWS),)](
        codes, absmax, nested_absmax, offset, values, nested_values, out, len(out), len(codes), blocks,
        rows=ROWS, half=32, nested=256, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
