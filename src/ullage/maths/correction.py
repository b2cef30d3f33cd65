"""Correction for tokens sampled by an engine whose log-probs are not the trainer's: weights and rejection.

Both look at rho = exp(old log-prob - rollout log-prob), of a token or of a whole sequence. Bypassing the correction
needs no function: the rollout's log-probs take the place of the old ones.
"""

import math

import torch
from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.config.check import REJECTION_RULES
from ullage.maths.losses import MAX_LOG_RATIO
from ullage.maths.masked import ALONE, EPSILON, row_mean


def importance_weights(
    old_logprobs_NT: Tensor,
    rollout_logprobs_NT: Tensor,
    mask_NT: Tensor,
    *,
    level: str,
    high: float,
    low: float | None = None,
) -> Tensor:
    """Constant factors for the loss of each token: rho of the `token`, or the product over its `sequence`.

    Without `low`: truncated importance sampling, min(rho, high) (Ionides 2008, doi:10.1198/106186008X320456). With it:
    IcePop (arXiv:2510.18855), rho within [low, high] and 0 outside.
    """
    log_rho = _log_rho(old_logprobs_NT, rollout_logprobs_NT, mask_NT)
    if level == "sequence":
        log_rho = log_rho.sum(-1, keepdim=True).expand(log_rho.shape)
    rho = torch.exp(log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    weights = rho.clamp(max=high) if low is None else torch.where((rho >= low) & (rho <= high), rho, 0.0)
    return torch.where(mask_NT.bool(), weights, 0.0)


def normalised(weights_NT: Tensor, mask_NT: Tensor, *, level: str, ranks: Communicator = ALONE) -> Tensor:
    """Weights over their mean: of all tokens, or of all sequences that have any. Weights that vanish stay."""
    if level == "sequence":
        sums = [float(row_mean(weights_NT, mask_NT).sum()), float(mask_NT.bool().any(-1).sum())]
    else:
        sums = [float(weights_NT[mask_NT.bool()].sum()), float(mask_NT.sum())]
    total, count = ranks.sum(sums)
    mean = total / (count + EPSILON)
    return weights_NT / mean if mean > EPSILON else weights_NT


def sequence_weights(weights_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """[N, T] the geometric mean of a sequence's weights on each of its tokens: what GMPO's loss is multiplied by."""
    weight_N = torch.exp(row_mean(torch.log(weights_NT + 1e-10), mask_NT))
    return torch.where(mask_NT.bool(), weight_N[:, None], 0.0)


def keep(
    rule: str,
    old_logprobs_NT: Tensor,
    rollout_logprobs_NT: Tensor,
    mask_NT: Tensor,
    *,
    high: float,
    low: float | None = None,
) -> Tensor:
    """The mask without what a rule of `REJECTION_RULES` rejects; several rules: the intersection of their masks.

    A rule is the token's statistic, or its sum, mean or maximum over the sequence. With x = log rho clamped to +-20:
    k1 = -x must lie within [ln low, ln high] (`low` is 1 / high unless given); k2 = x^2 / 2 and k3 = e^x - 1 - x at
    most at `high`.
    """
    assert rule in REJECTION_RULES, f"unknown rule {rule}"
    scope, _, estimator = rule.rpartition("_")
    x = _log_rho(old_logprobs_NT, rollout_logprobs_NT, mask_NT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    statistic = _over_sequence(scope, {"k1": -x, "k2": x.square() / 2, "k3": torch.exp(x) - 1 - x}[estimator], mask_NT)
    if estimator != "k1":
        return mask_NT.bool() & (statistic <= high)
    lowest = -math.log(high) if low is None else math.log(low)
    return mask_NT.bool() & (statistic >= lowest) & (statistic <= math.log(high))


def _log_rho(old_logprobs_NT: Tensor, rollout_logprobs_NT: Tensor, mask_NT: Tensor) -> Tensor:
    return torch.where(mask_NT.bool(), (old_logprobs_NT - rollout_logprobs_NT).detach(), 0.0)


def _over_sequence(scope: str, statistic_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """A token's statistic, or [N, 1] its sum, mean or maximum; masked tokens have statistic 0."""
    if scope == "token":
        return statistic_NT
    if scope == "seq_sum":
        return statistic_NT.sum(-1, keepdim=True)
    if scope == "seq_mean":
        return row_mean(statistic_NT, mask_NT)[:, None]
    # One more 0 changes no maximum of k2 or k3, and an empty row has one.
    return torch.nn.functional.pad(statistic_NT, (0, 1)).amax(-1, keepdim=True)
