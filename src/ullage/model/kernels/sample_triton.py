"""The kernels of `kernels/sample.py`: one reads all logits for the masses of their blocks, one runs both rounds.

Noise in float32: u is a number in (0, 1) that is exact in float64 only, so E = -log u comes from 1 - u instead.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MASS_WARPS = 1
"""A thread then has eight loads of 16 bytes on their way at once, and no sum leaves a warp."""
RACE_WARPS = 4


@triton.jit
def _mixed(state, first: tl.constexpr, second: tl.constexpr, third: tl.constexpr, one: tl.constexpr, two: tl.constexpr):  # noqa: ANN001, ANN202 -- Triton's own types
    state = (state ^ (state >> first)) * tl.full([1], one, tl.uint32)
    state = (state ^ (state >> second)) * tl.full([1], two, tl.uint32)
    return state ^ (state >> third)


@triton.jit
def _gumbel(seed, position, number):  # noqa: ANN001, ANN202
    """Noise of each token or block, of the bits of `noise_bits`."""
    golden = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    state = seed.to(tl.uint64) + (position.to(tl.uint64) + 1) * golden
    state = (state ^ (state >> 30)) * tl.full([1], 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full([1], 0x94D049BB133111EB, tl.uint64)
    state = state ^ (state >> 31)
    mixed = _mixed(number.to(tl.uint32) + state.to(tl.uint32), 16, 13, 16, 0x85EBCA6B, 0xC2B2AE35)
    bits = _mixed(mixed + (state >> 32).to(tl.uint32), 16, 15, 15, 0x21F0AAAD, 0xD35A2D97)
    small = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    small = tl.minimum(small, 0.99999994)  # the largest below 1
    # -log(1 - small), where 1 - small has too few digits for a result that is small itself by a series.
    series = small * (1.0 + small * (0.5 + small * (0.3333333333333333 + small * 0.25)))
    return -tl.log(tl.where(small < 0.03125, series, -tl.log(1.0 - small)))


@triton.jit
def _inverse(temperature):  # noqa: ANN001, ANN202
    return 1.0 / tl.where(temperature == 0, 1.0, temperature)


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _masses(logits, temperatures, largest, total, stride, vocabulary, block: tl.constexpr):  # noqa: ANN001, ANN202
    """The largest logit of a block, and the sum of the exponentials of what each x has less than the largest."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)  # neighbours read what lies side by side
    token = part * block + tl.arange(0, block)
    logit = tl.load(logits + row * stride + token, mask=token < vocabulary, other=-float("inf"))
    scale = _inverse(tl.load(temperatures + row)) * 1.4426950408889634  # log2 e
    most = tl.max(logit, 0)
    share = tl.exp2((logit - tl.where(most == -float("inf"), 0.0, most)) * scale)
    spot = row * tl.num_programs(0) + part
    tl.store(largest + spot, most)
    tl.store(total + spot, tl.sum(share, 0))


@triton.jit
def _first_largest(score):  # noqa: ANN001, ANN202
    score = tl.where(score == score, score, -float("inf"))  # a NaN reaches the log-prob, not the order
    return tl.argmax(score, 0, tie_break_left=True)


@triton.jit(do_not_specialize_on_alignment=["temperatures", "seeds", "positions"])  # newcomers' rows begin anywhere
def _race(  # noqa: ANN202
    logits, temperatures, seeds, positions, largest, total, tokens, logprobs,  # noqa: ANN001
    stride, vocabulary, parts, block: tl.constexpr, parts_tile: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    greedy, inverse = temperature == 0, _inverse(temperature)
    seed, position = tl.load(seeds + row + tl.zeros([1], tl.int32)), tl.load(positions + row + tl.zeros([1], tl.int32))
    part = tl.arange(0, parts_tile)
    spot, real = row * parts + part, part < parts
    sums = tl.load(total + spot, mask=real, other=0.0)
    m = tl.load(largest + spot, mask=real, other=-float("inf"))
    m = tl.where(sums == sums, m, -float("inf"))  # one NaN keeps its block from winning
    most = tl.max(m, 0)
    # Less the largest, which changes no order and keeps digits.
    mass = (m - most) * inverse + tl.log(sums)
    winner = _first_largest(tl.where(greedy, m, mass + _gumbel(seed, position, -1 - part)))

    token = winner * block + tl.arange(0, block)
    logit = tl.load(logits + row * stride + token, mask=token < vocabulary, other=-float("inf"))
    score = tl.where(greedy, logit, (logit - most) * inverse + _gumbel(seed, position, token))
    chosen = winner * block + _first_largest(score)
    whole = tl.log(tl.sum(sums * tl.exp((m - most) * inverse), 0))
    tl.store(tokens + row, chosen.to(tl.int64))
    tl.store(logprobs + row, (tl.load(logits + row * stride + chosen) - most) * inverse - whole)


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    scratch: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    block: int,
) -> None:
    """Fill `tokens` and `logprobs` [S]; `scratch` is float32, [2, S, blocks]."""
    _, rows, parts = scratch.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    largest, total = scratch
    stride, vocabulary = logits.stride(0), logits.shape[1]
    _masses[(parts, rows)](
        logits, temperature, largest, total, stride, vocabulary, block=block, num_warps=MASS_WARPS
    )  # fmt: skip
    _race[(rows,)](
        logits, temperature, seeds, positions, largest, total, tokens, logprobs, stride, vocabulary, parts,
        block=block, parts_tile=triton.next_power_of_2(parts), num_warps=RACE_WARPS,
    )  # fmt: skip
