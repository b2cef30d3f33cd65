"""The kernels of `kernels/sample.py`: a block of a row's logits runs its own race, a second kernel picks the winner.

Noise in float32: u is a number in (0, 1) that is exact in float64 only, so E = -log u comes from 1 - u instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ullage.model.kernels.sample import BLOCK

WARPS = 1


@triton.jit
def _mixed(state, first: tl.constexpr, second: tl.constexpr, third: tl.constexpr, one: tl.constexpr, two: tl.constexpr):  # noqa: ANN001, ANN202 -- Triton's own types
    state = (state ^ (state >> first)) * tl.full([1], one, tl.uint32)
    state = (state ^ (state >> second)) * tl.full([1], two, tl.uint32)
    return state ^ (state >> third)


@triton.jit
def _bits(seed, position, token):  # noqa: ANN001, ANN202
    """uint32 for each token, as in `noise_bits`."""
    golden = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    state = seed.to(tl.uint64) + (position.to(tl.uint64) + 1) * golden
    state = (state ^ (state >> 30)) * tl.full([1], 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full([1], 0x94D049BB133111EB, tl.uint64)
    state = state ^ (state >> 31)
    mixed = _mixed(token.to(tl.uint32) + state.to(tl.uint32), 16, 13, 16, 0x85EBCA6B, 0xC2B2AE35)
    return _mixed(mixed + (state >> 32).to(tl.uint32), 16, 15, 15, 0x21F0AAAD, 0xD35A2D97)


@triton.jit
def _inverse(temperature):  # noqa: ANN001, ANN202
    return 1.0 / tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def _log2(x, fast: tl.constexpr):  # noqa: ANN001, ANN202
    # Triton's own is a polynomial of a dozen instructions; the interpreter has no other.
    return libdevice.fast_log2f(x) if fast else tl.log2(x)


@triton.jit
def _race(  # noqa: ANN202
    logits, temperatures, seeds, positions, largest, total, best, winner,  # noqa: ANN001
    stride, vocabulary, block: tl.constexpr, fast: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0
    token = part * block + tl.arange(0, block)
    inside = token < vocabulary
    x = tl.load(logits + row * stride + token, mask=inside, other=-float("inf")) * _inverse(temperature)
    most = tl.max(x, 0)
    share = tl.exp(x - tl.where(most == -float("inf"), 0.0, most))
    seed, position = tl.load(seeds + row + tl.zeros([1], tl.int32)), tl.load(positions + row + tl.zeros([1], tl.int32))
    small = (_bits(seed, position, token).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    small = tl.minimum(small, 0.99999994)  # the largest below 1
    # -log(1 - small): a fast logarithm is exact to 2^-22 only, which is too little where the result is small itself.
    series = small * (1.0 + small * (0.5 + small * (0.3333333333333333 + small * 0.25)))
    exponential = tl.where(small < 0.03125, series, -0.6931471805599453 * _log2(1.0 - small, fast))
    score = x - tl.where(greedy, 0.0, 0.6931471805599453) * _log2(exponential, fast)
    score = tl.where(inside & (score == score), score, -float("inf"))  # a NaN reaches the log-prob, not the order
    value, place = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    spot = row * tl.num_programs(1) + part
    tl.store(largest + spot, most)
    tl.store(total + spot, tl.sum(share, 0))
    tl.store(best + spot, value)
    tl.store(winner + spot, part * block + place)


@triton.jit
def _finish(  # noqa: ANN202
    logits, temperatures, largest, total, best, winner, tokens, logprobs,  # noqa: ANN001
    stride, parts, parts_tile: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    part = tl.arange(0, parts_tile)
    spot, real = row * parts + part, part < parts
    m = tl.load(largest + spot, mask=real, other=-float("inf"))
    most = tl.max(m, 0)
    score = tl.load(best + spot, mask=real, other=-float("inf"))
    place = tl.argmax(score, 0, tie_break_left=True)
    token = tl.sum(tl.where(part == place, tl.load(winner + spot, mask=real, other=0), 0), 0)
    x = tl.load(logits + row * stride + token) * _inverse(temperature)
    sums = tl.load(total + spot, mask=real, other=0.0) * tl.exp(m - most)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, x - (most + tl.log(tl.sum(sums, 0))))


def draw(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor, logprobs: Tensor
) -> None:
    """Fill `tokens` and `logprobs`; 16 bytes of scratch for each block of logits."""
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    parts = triton.cdiv(vocabulary, BLOCK)
    largest, total, best = torch.empty(3, rows, parts, dtype=torch.float32, device=logits.device)
    winner = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _race[(rows, parts)](
        logits, temperature, seeds, positions, largest, total, best, winner, logits.stride(0), vocabulary,
        block=BLOCK, fast=logits.is_cuda, num_warps=WARPS,
    )  # fmt: skip
    _finish[(rows,)](
        logits, temperature, largest, total, best, winner, tokens, logprobs, logits.stride(0), parts,
        parts_tile=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
