"""Losses that hold back the tokens whose log-prob and advantage vary together, for these drive the entropy down.

Clip-Cov and KL-Cov (arXiv:2505.22617). Which tokens is decided once for a whole mini-batch of all ranks, in a pass
before the update (`..._select`); the losses take that choice, so no division into micro-batches or ranks changes them.
"""

import torch
from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.maths.losses import clipped_by_ratio, log_ratio
from ullage.maths.masked import ALONE, EPSILON

# Constants of splitmix64 (doi:10.1145/2660193.2660195) as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def clip_cov_select(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    advantages_NT: Tensor,
    mask_NT: Tensor,
    sample_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    fraction: float,
    low: float,
    high: float,
    seed: int,
    ranks: Communicator = ALONE,
) -> Tensor:
    """The tokens whose loss Clip-Cov drops: a random choice among those with a covariance in (low, high).

    Tokens that PPO's clip has already stopped are no candidates. The choice depends on the seed and on `sample_N`,
    numbers that tell samples apart on all ranks, and on nothing else.

    Args:
        fraction: share of the mini-batch's tokens to drop, at least one token.
    """
    covariance_NT, tokens = _covariance(logprobs_NT, advantages_NT, mask_NT, ranks)
    ratio = torch.exp(log_ratio(logprobs_NT.detach(), old_logprobs_NT))
    _, clipped = clipped_by_ratio(ratio, advantages_NT, clip_low=clip_low, clip_high=clip_high)
    candidates = mask_NT.bool() & ~clipped & (covariance_NT > low) & (covariance_NT < high)
    scores = torch.zeros_like(covariance_NT)
    return _highest(scores, candidates, token_noise(seed, sample_N, mask_NT.shape[1]), _share(fraction, tokens), ranks)


def clip_cov(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    advantages_NT: Tensor,
    selected_NT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Clip-Cov (arXiv:2505.22617): PPO's clipped loss, 0 on selected tokens; no dual clip.

    Gives (loss, where it has no gradient by either clip).
    """
    ratio = torch.exp(log_ratio(logprobs_NT, old_logprobs_NT))
    loss, clipped = clipped_by_ratio(ratio, advantages_NT, clip_low=clip_low, clip_high=clip_high)
    return torch.where(selected_NT, 0.0, loss), clipped | selected_NT


def kl_cov_select(
    logprobs_NT: Tensor,
    advantages_NT: Tensor,
    mask_NT: Tensor,
    sample_N: Tensor,
    *,
    fraction: float,
    ranks: Communicator = ALONE,
) -> Tensor:
    """The tokens KL-Cov penalises: those of highest covariance; among equals, whichever a hash of their place says.

    Args:
        fraction: share of the mini-batch's tokens to penalise, at least one token.
    """
    covariance_NT, tokens = _covariance(logprobs_NT, advantages_NT, mask_NT, ranks)
    noise_NT = token_noise(0, sample_N, mask_NT.shape[1])
    return _highest(covariance_NT, mask_NT.bool(), noise_NT, _share(fraction, tokens), ranks)


def kl_cov(
    logprobs_NT: Tensor, old_logprobs_NT: Tensor, advantages_NT: Tensor, selected_NT: Tensor, *, coefficient: float
) -> Tensor:
    """KL-Cov (arXiv:2505.22617): -A r without a clip, plus coefficient |log r| on selected tokens."""
    log_ratio_NT = log_ratio(logprobs_NT, old_logprobs_NT)
    penalty = torch.where(selected_NT, coefficient * log_ratio_NT.abs(), 0.0)
    return -advantages_NT * torch.exp(log_ratio_NT) + penalty


def token_noise(seed: int, sample_N: Tensor, num_tokens: int) -> Tensor:
    """[N, T] uniform numbers in [0, 1) that depend only on seed, sample and place: two rounds of splitmix64."""
    place_T = torch.arange(num_tokens, device=sample_N.device)
    rows_N = _mix(seed + _GOLDEN * (sample_N.long() + 1))
    return _shift(_mix(rows_N[:, None] + _GOLDEN * (place_T + 1)), 11).double() / (1 << 53)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift to the right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _share(fraction: float, tokens: float) -> int:
    return max(1, int(fraction * tokens))


def _covariance(
    logprobs_NT: Tensor, advantages_NT: Tensor, mask_NT: Tensor, ranks: Communicator
) -> tuple[Tensor, float]:
    """((A - mean A) (log p - mean log p) of each token, number of tokens), means over all ranks, in float64."""
    mask = mask_NT.bool()
    advantages, logprobs = advantages_NT.double(), logprobs_NT.detach().double()
    sums = [float(mask.sum()), float(advantages[mask].sum()), float(logprobs[mask].sum())]
    tokens, advantage, logprob = ranks.sum(sums)
    centred = (advantages - advantage / (tokens + EPSILON)) * (logprobs - logprob / (tokens + EPSILON))
    return torch.where(mask, centred, 0.0), tokens


def _highest(scores_NT: Tensor, candidates_NT: Tensor, noise_NT: Tensor, count: int, ranks: Communicator) -> Tensor:
    """Mask of the `count` candidates of highest score over all ranks, equal scores ordered by noise."""
    scores, noise = scores_NT[candidates_NT], noise_NT[candidates_NT]
    order = noise.argsort(descending=True)
    order = order[scores[order].argsort(descending=True, stable=True)][:count]
    mine = torch.stack([scores[order], noise[order]], dim=1).tolist()
    everyone = sorted((pair for part in ranks.gather(mine) for pair in part), reverse=True)
    if not everyone:
        return torch.zeros_like(candidates_NT)
    last_score, last_noise = map(float, everyone[:count][-1])
    return candidates_NT & ((scores_NT > last_score) | ((scores_NT == last_score) & (noise_NT >= last_noise)))
