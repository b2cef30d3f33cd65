"""Drawing tokens: noise that is a function of (seed, position, token id), so batching and restarts change nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ullage.model.head import without
from ullage.model.kernels.sample import sample_fused, sample_plain
from ullage.model.kernels.truncate import least_kept


class Drawn(NamedTuple):
    """One token for each row."""

    tokens: Tensor
    logprobs: Tensor
    """Under the distribution it was drawn from."""
    support_SV: Tensor | None
    """The ids that top-p and top-k left; None: all."""


def draw(
    logits_SV: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    truncates: bool,
    fused: bool,
) -> Drawn:
    """A token for each row by its own settings, [S] each; 0 is greedy.

    `truncates`: some row's top-p or top-k leaves ids out. `fused`: by the kernels for CUDA, in float32.
    """
    support = None
    if truncates:
        greedy = temperature == 0
        logits_SV = logits_SV / torch.where(greedy, 1, temperature)[:, None]
        if fused:
            # What is no number stays, so that the log-prob says so.
            support = ~(logits_SV < least_kept(logits_SV, top_k, top_p)[:, None])
        else:
            support = kept(logits_SV, top_p[:, None], top_k[:, None])
        logits_SV, temperature = without(logits_SV, support), torch.where(greedy, 0.0, 1.0).to(temperature.dtype)
    sample = sample_fused if fused else sample_plain
    tokens, logprobs = sample(logits_SV, temperature, seeds, positions)
    return Drawn(tokens, logprobs, support)


def kept(logits_SV: Tensor, top_p_S1: Tensor, top_k_S1: Tensor) -> Tensor:
    """[S, V] the top-k ids and, of those, the smallest set whose probability reaches top-p, by each row's own."""
    ordered, order = logits_SV.sort(-1, descending=True)
    keep = torch.arange(ordered.shape[-1], device=ordered.device) < top_k_S1
    p = torch.where(keep, ordered, -torch.inf).softmax(-1)
    keep &= (p.cumsum(-1) - p < top_p_S1) | (top_p_S1 >= 1)
    keep |= ordered.isnan()  # so that the log-prob says so
    return torch.zeros_like(keep).scatter(-1, order, keep)


def ids_of(support_SV: Tensor) -> tuple[Tensor, ...]:
    """[S] the ids of each row, on the host."""
    places = support_SV.nonzero().cpu()
    return places[:, 1].to(torch.int32).split(support_SV.sum(-1).tolist())
