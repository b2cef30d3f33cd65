"""Drawing one token per row in one read of its logits, by a Gumbel race in two rounds: blocks of ids, then ids.

Gumbel-max takes the largest of x + noise, where x = logit / temperature. The largest of a block is, in distribution,
its log-sum-exp plus one noise: so blocks race first, by their mass, and then only the ids of the block that won. A row
needs noise for V / 1024 blocks and 1024 ids instead of all V, and the draw is as exact.

The noise is a hash of (seed, position, id): no state, no order, so batching, restarts and devices change nothing.
`sample_plain` is the definition; the kernels of `sample_triton.py` compute the same race in float32.
Shapes: S rows, V vocabulary, B blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
"""Ids that race as one; part of the definition. The last block of a vocabulary may be shorter."""
_CHUNK = 1 << 18
"""Logits that are in float64 at once in the plain twin."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_64 = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys for each (seed, position): the halves, low first, of splitmix64 (Steele et al. 2014)."""
    state = seeds + (positions + 1) * _GOLDEN
    for bits, factor in _MIX_64:
        state = (state ^ _shift(state, bits, 64)) * factor
    state = state ^ _shift(state, 31, 64)
    return state.to(torch.int32), (state >> 32).to(torch.int32)


def noise_bits(keys: tuple[Tensor, Tensor], ids: Tensor) -> Tensor:
    """[S, N] int32: MurmurHash3's mixer of id plus first key, then lowbias32 (hash-prospector) of that plus the second.

    `ids` are int32, [N] or [S, N]. Each row is a permutation of the integers, so no two ids of a row get the same
    number. Tokens count from 0 up, blocks from -1 down.
    """
    state = ids + keys[0][:, None]
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
    """As `sample_fused`, by the definition, for any dtype and device.

    Masses and scores are in float64: their order does not hang on how a device or a vector unit rounds a logarithm.
    """
    tokens, logprobs = torch.empty_like(seeds), logits.new_empty(len(logits))
    divisor = torch.where(temperature == 0, 1, temperature)[:, None].to(logits.dtype)
    for start in range(0, len(logits), _CHUNK // BLOCK):
        part = slice(start, start + _CHUNK // BLOCK)
        keys = row_keys(seeds[part], positions[part])
        tokens[part], logprobs[part] = _two_rounds(logits[part], divisor[part], (temperature == 0)[part, None], keys)
    return tokens, logprobs


def _two_rounds(logits: Tensor, divisor: Tensor, greedy: Tensor, keys: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    largest, masses, whole = _blocks(logits, divisor)
    blocks = torch.arange(masses.shape[1], dtype=torch.int32, device=logits.device)
    scores = torch.where(greedy, largest, masses + gumbel(noise_bits(keys, -1 - blocks)))
    block = _first_largest(scores)[:, None]

    ids = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    x = logits.gather(1, ids.clamp(max=logits.shape[1] - 1)) / divisor
    x.masked_fill_(ids >= logits.shape[1], -torch.inf)
    scores = x + gumbel(noise_bits(keys, ids.to(torch.int32))).masked_fill_(greedy, 0)
    place = _first_largest(scores)[:, None]
    return (block * BLOCK + place)[:, 0], x.gather(1, place)[:, 0] - whole


def _blocks(logits: Tensor, divisor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[S, B] float64 each: the largest x of each block, and the log of the sum of their exponentials.

    [S] the same of a whole row, in its own precision: as a trainer computes it, to the last bit.
    """
    largest, masses, wholes = [], [], []
    count = max(1, _CHUNK // logits.shape[1])
    for some, by in zip(logits.split(count), divisor.split(count), strict=True):
        scaled = some / by
        wholes.append(scaled.logsumexp(-1))
        x = torch.nn.functional.pad(scaled, (0, -some.shape[1] % BLOCK), value=-torch.inf).unflatten(1, (-1, BLOCK))
        most = x.amax(-1).double()
        anchor = most.masked_fill(most == -torch.inf, 0)
        largest.append(most)
        masses.append(x.double().sub_(anchor[:, :, None]).exp_().sum(-1).log_().add_(anchor))
    return torch.cat(largest), torch.cat(masses), torch.cat(wholes)


def _first_largest(scores: Tensor) -> Tensor:
    """[S] the place of each row's largest score: a NaN reaches the log-prob, not the order."""
    return scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax(-1)


def sample_fused(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A token for each row of float32 logits [S, V] and its log-prob at the row's temperature: int64 [S], float32 [S].

    `temperature` [S] is float32; 0 takes the largest logit, with the log-prob of temperature 1. `seeds` and `positions`
    [S] are int64. Of equal scores the lowest block wins, and in it the lowest id.
    """
    tokens, logprobs = torch.empty_like(seeds), logits.new_empty(len(logits))
    scratch = logits.new_empty(2, len(logits), -(-logits.shape[1] // BLOCK))
    if logits.device.type != "meta":  # a trace needs only shapes
        from ullage.model.kernels.sample_triton import draw

        draw(logits, temperature, seeds, positions, scratch, tokens, logprobs, BLOCK)
    return tokens, logprobs
