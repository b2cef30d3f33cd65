"""Drawing tokens: one stateless uniform number per (seed, position), so batching and restarts change nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ullage.model.head import without
from ullage.rollout.sampling import Sampling

_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """A float64 in [0, 1) for each (seed, position): the splitmix64 mixer (Steele et al. 2014) on wrapping int64."""
    state = seeds + (positions + 1) * _GOLDEN
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    state = state ^ _shift(state, 31)
    return _shift(state, 11).to(torch.float64) * 2.0**-53


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


class Drawn(NamedTuple):
    """One token for each row."""

    tokens: Tensor
    logprobs: Tensor
    """Under the distribution it was drawn from."""
    support_SV: Tensor | None
    """The ids that top-p and top-k left; None: all."""


def draw(logits_SV: Tensor, seeds: Tensor, positions: Tensor, sampling: Sampling) -> Drawn:
    """A token for each row; logits already carry the temperature."""
    support = None
    if sampling.truncates:
        support = kept(logits_SV, sampling)
        logits_SV = without(logits_SV, support)
    logprobs = logits_SV - logits_SV.logsumexp(-1, keepdim=True)
    if sampling.temperature == 0:
        tokens = logits_SV.argmax(-1)
        return Drawn(tokens, logprobs.gather(-1, tokens[:, None])[:, 0], None)
    # Inverse CDF in float64: one uniform number per token, and a cumulative sum whose rounding cannot matter.
    cumulative = logprobs.exp().to(torch.float64).cumsum(-1)
    threshold = uniform(seeds, positions)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits_SV.shape[-1] - 1)
    return Drawn(tokens, logprobs.gather(-1, tokens[:, None])[:, 0], support)


def kept(logits_SV: Tensor, sampling: Sampling) -> Tensor:
    """[S, V] the top-k ids and, of those, the smallest set whose probability reaches top-p."""
    ordered, order = logits_SV.sort(-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k > 0:
        keep[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        p = torch.where(keep, ordered, -torch.inf).softmax(-1)
        keep &= p.cumsum(-1) - p < sampling.top_p
    return torch.zeros_like(keep).scatter(-1, order, keep)


def ids_of(support_SV: Tensor) -> tuple[Tensor, ...]:
    """[S] the ids of each row, on the host."""
    places = support_SV.nonzero().cpu()
    return places[:, 1].to(torch.int32).split(support_SV.sum(-1).tolist())
