"""The kernel of `kernels/truncate.py`: one program finds one row's threshold, four bits at a time."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
WARPS = 8


@triton.jit
def _ordered(bits):  # noqa: ANN001, ANN202 -- Triton's own types
    """The bits of floats as int32 of the same order; its own inverse."""
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _edge(start, vocabulary, most, least, goal, weighted: tl.constexpr, block: tl.constexpr):  # noqa: ANN001, ANN202
    """The largest number such that the logits that are no smaller, of those from `least` on, weigh `goal` or more."""
    found = least.to(tl.int64) * 0  # counted from the lowest int32
    digit = tl.arange(0, 16).to(tl.int64)
    for step in range(8):
        candidates = (found + (digit << (28 - 4 * step)) - 2147483648).to(tl.int32)
        mass = tl.zeros([16], tl.float32)
        for first in range(0, vocabulary, block):
            place = first + tl.arange(0, block)
            inside = place < vocabulary
            x = tl.load(start + place, mask=inside, other=-float("inf"))
            number = _ordered(x.to(tl.int32, bitcast=True))
            weight = tl.exp(x - most) if weighted else tl.where(inside, 1.0, 0.0)
            weight = tl.where(number >= least, weight, 0.0)
            mass += tl.sum(tl.where(number[None, :] >= candidates[:, None], weight[None, :], 0.0), 1)
        # Weights fall from digit to digit: the last that is enough.
        chosen = tl.maximum(tl.sum((mass >= goal).to(tl.int64), 0) - 1, 0)
        found += chosen << (28 - 4 * step)
    return (found - 2147483648).to(tl.int32)


@triton.jit
def _search(logits, top_k, top_p, out, stride, vocabulary, block: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    least = _ordered(tl.full([], -float("inf"), tl.float32).to(tl.int32, bitcast=True))
    if k < vocabulary:
        least = _edge(start, vocabulary, 0.0, least, k.to(tl.float32), False, block)
    if p < 1.0:
        most = -float("inf")
        for first in range(0, vocabulary, block):
            place = first + tl.arange(0, block)
            most = tl.maximum(most, tl.max(tl.load(start + place, mask=place < vocabulary, other=-float("inf")), 0))
        total = 0.0
        for first in range(0, vocabulary, block):
            place = first + tl.arange(0, block)
            x = tl.load(start + place, mask=place < vocabulary, other=-float("inf"))
            total += tl.sum(tl.where(_ordered(x.to(tl.int32, bitcast=True)) >= least, tl.exp(x - most), 0.0), 0)
        least = _edge(start, vocabulary, most, least, p * total, True, block)
    tl.store(out + row, _ordered(least).to(tl.float32, bitcast=True))


def search(logits: Tensor, top_k: Tensor, top_p: Tensor, out: Tensor) -> None:
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    _search[(rows,)](logits, top_k, top_p, out, logits.stride(0), vocabulary, block=BLOCK, num_warps=WARPS)
