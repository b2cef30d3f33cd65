"""Drawing one token per row in one read of its logits, by Gumbel-max: the largest of logit / temperature + noise.

The noise is a hash of (seed, position, token id): no state, no order, so batching, restarts and devices change nothing.
`sample_plain` is the definition; the kernels of `sample_triton.py` compute the same race in float32.
Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
"""Logits of one program."""
_CHUNK = 1 << 18
"""Logits whose noise is alive at once in the plain twin."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_64 = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys for each (seed, position): the halves, low first, of splitmix64 (Steele et al. 2014)."""
    state = seeds + (positions + 1) * _GOLDEN
    for bits, factor in _MIX_64:
        state = (state ^ _shift(state, bits, 64)) * factor
    state = state ^ _shift(state, 31, 64)
    return state.to(torch.int32), (state >> 32).to(torch.int32)


def noise_bits(keys: tuple[Tensor, Tensor], vocabulary: int) -> Tensor:
    """[S, V] int32: MurmurHash3's mixer of id plus first key, then lowbias32 (hash-prospector) of that plus the second.

    Each row is a permutation of the integers, so no two ids of a row get the same number.
    """
    state = torch.arange(vocabulary, dtype=torch.int32, device=keys[0].device) + keys[0][:, None]
    _mix_(state, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35))
    state += keys[1][:, None]
    _mix_(state, (16, 15, 15), (0x21F0AAAD, 0xD35A2D97))
    return state


def _mix_(state: Tensor, shifts: tuple[int, int, int], factors: tuple[int, int]) -> None:
    state ^= _shift(state, shifts[0], 32)
    for factor, bits in zip(factors, shifts[1:], strict=True):
        state *= factor - (1 << 32) if factor >> 31 else factor  # wraps, as unsigned numbers do
        state ^= _shift(state, bits, 32)


def _shift(value: Tensor, bits: int, width: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (width - bits)) - 1)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, of int32 bits: u = 1 - (bits + 1/2) / 2^32 is exact, so it is never 0 or 1.

    The smallest of the bits, as unsigned numbers, win; near them u needs more digits than float32 has near 1.
    """
    unsigned = torch.where(bits < 0, bits.double() + 2.0**32, bits.double())
    return unsigned.add_(0.5).mul_(-(2.0**-32)).log1p_().neg_().log_().neg_()


def sample_plain(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As `sample_fused`, by the definition, for any dtype and device."""
    greedy = temperature == 0
    tokens = torch.empty_like(seeds)
    logprobs = torch.empty_like(logits[:, 0])
    first, second = row_keys(seeds, positions)
    vocabulary = logits.shape[1]
    for start in range(0, len(logits), max(1, _CHUNK // vocabulary)):
        part = slice(start, start + max(1, _CHUNK // vocabulary))
        scaled = logits[part] / torch.where(greedy, 1, temperature)[part, None].to(logits.dtype)
        # In float64 the order of the scores does not hang on how a device or a vector unit rounds a logarithm.
        noise = gumbel(noise_bits((first[part], second[part]), vocabulary))
        scores = noise.masked_fill_(greedy[part, None], 0).add_(scaled)
        tokens[part] = scores.argmax(-1)
        chosen = scaled.gather(-1, tokens[part, None])[:, 0]
        logprobs[part] = chosen - scaled.logsumexp(-1)
    return tokens, logprobs


@torch.library.custom_op("ullage::sample", mutates_args=())
def sample_fused(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row of float32 logits [S, V] and its log-prob at the row's temperature: int64 [S], float32 [S].

    `temperature` [S] is float32; 0 takes the largest logit, with the log-prob of temperature 1. `seeds` and `positions`
    [S] are int64. Of equal scores the lowest id wins.
    """
    from ullage.model.kernels.sample_triton import draw  # a trace needs only shapes

    tokens, logprobs = torch.empty_like(seeds), logits.new_empty(len(logits))
    draw(logits, temperature, seeds, positions, tokens, logprobs)
    return tokens, logprobs


@sample_fused.register_fake
def _(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    del temperature, positions
    return torch.empty_like(seeds), logits.new_empty(logits.shape[0])
