"""Drawing tokens: noise that is a function of (seed, position, token id), so batching and restarts change nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ullage.model.head import without
from ullage.model.kernels.sample import sample_fused, sample_plain
from ullage.rollout.sampling import Sampling


class Drawn(NamedTuple):
    """One token for each row."""

    tokens: Tensor
    logprobs: Tensor
    """Under the distribution it was drawn from."""
    support_SV: Tensor | None
    """The ids that top-p and top-k left; None: all."""


def draw(logits_SV: Tensor, seeds: Tensor, positions: Tensor, sampling: Sampling, *, fused: bool = False) -> Drawn:
    """A token for each row; logits already carry the temperature. `fused`: by the kernels for CUDA, in float32."""
    support = None
    if sampling.truncates:
        support = kept(logits_SV, sampling)
        logits_SV = without(logits_SV, support)
    temperature = torch.full_like(logits_SV[:, 0], 0.0 if sampling.temperature == 0 else 1.0)
    sample = sample_fused if fused else sample_plain
    tokens, logprobs = sample(logits_SV, temperature, seeds, positions)
    return Drawn(tokens, logprobs, support)


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
