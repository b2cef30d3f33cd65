"""Policy losses per token; masks and denominators are applied by `aggregate`.

Each gives the loss, and where its clip was active if it has one. A loss that compares whole sequences needs whole rows;
beyond that, rows can be computed in any division. Losses that choose tokens by a statistic of the mini-batch are in
`covariance`.
"""

import torch
from torch import Tensor

from ullage.maths.masked import EPSILON, row_mean

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before the exponential, as verl does, so that one absurd token cannot overflow."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""The same for the mean log-ratio of a sequence, upper side only."""


def log_ratio(logprobs_NT: Tensor, old_logprobs_NT: Tensor) -> Tensor:
    """log(policy / old policy) of each token, within reach of the exponential."""
    return (logprobs_NT - old_logprobs_NT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    advantages_NT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss with separate low and high clip and dual clip: (loss, where the clip was active).

    PPO: arXiv:1707.06347 eq. 7. Dual clip bounds the loss by `-dual_clip * advantage` where the advantage is negative
    (arXiv:1912.09729 eq. 5). `clip_high` above `clip_low` is DAPO's clip-higher (arXiv:2503.14476 eq. 10).
    """
    ratio = torch.exp(log_ratio(logprobs_NT, old_logprobs_NT))
    loss, clipped = clipped_by_ratio(ratio, advantages_NT, clip_low=clip_low, clip_high=clip_high)
    bounded = torch.minimum(loss, -advantages_NT * dual_clip)
    return torch.where(advantages_NT < 0, bounded, loss), clipped


def clipped_by_ratio(
    ratio_NT: Tensor, advantages_NT: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)): (loss, where the clip was active)."""
    unclipped = -advantages_NT * ratio_NT
    clipped = -advantages_NT * ratio_NT.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def gspo(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    advantages_NT: Tensor,
    mask_NT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """GSPO-token (arXiv:2507.18071 eq. 13, 14): PPO's clip on the sequence's ratio s = exp(mean log-ratio).

    Every token carries the value s and the gradient of its own log-prob. Meant for `seq-mean-token-mean`.
    """
    mask = mask_NT.bool()
    total_N = torch.where(mask, (logprobs_NT - old_logprobs_NT).detach(), 0.0).sum(-1)
    log_sequence_ratio_N = total_N / mask.sum(-1).clamp(min=1)
    own_gradient_NT = torch.where(mask, logprobs_NT - logprobs_NT.detach(), 0.0)
    log_ratio_NT = (own_gradient_NT + log_sequence_ratio_N[:, None]).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    return clipped_by_ratio(torch.exp(log_ratio_NT), advantages_NT, clip_low=clip_low, clip_high=clip_high)


def sapo(
    logprobs_NT: Tensor, old_logprobs_NT: Tensor, advantages_NT: Tensor, *, tau_positive: float, tau_negative: float
) -> Tensor:
    """SAPO (arXiv:2511.20347): the clip replaced by a soft gate, -A (4 / tau) sigmoid(tau (r - 1)).

    tau, how fast the gate closes, is `tau_positive` where the advantage is, else `tau_negative`. Always aggregated by
    `seq-mean-token-mean`.
    """
    ratio = torch.exp(log_ratio(logprobs_NT, old_logprobs_NT))
    tau = torch.where(advantages_NT > 0, torch.full_like(ratio, tau_positive), tau_negative)
    return -advantages_NT * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)


def gpg(logprobs_NT: Tensor, advantages_NT: Tensor) -> Tensor:
    """GPG (arXiv:2504.02546): the plain policy gradient, -A log p."""
    return -advantages_NT * logprobs_NT


def cispo(
    logprobs_NT: Tensor, old_logprobs_NT: Tensor, advantages_NT: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO (arXiv:2506.13585): -A log p times the clipped ratio as a constant, so every token has a gradient."""
    ratio = torch.exp(log_ratio(logprobs_NT, old_logprobs_NT)).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages_NT * logprobs_NT, weight != ratio


def geo_mean(
    logprobs_NT: Tensor,
    old_logprobs_NT: Tensor,
    advantages_NT: Tensor,
    mask_NT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """GMPO (arXiv:2507.20673): minus the advantage times the geometric mean of the sequence's clipped ratios.

    Log-ratios are clipped (above by `clip_high` where A > 0, below by `-clip_low` where A < 0), then averaged; the
    advantage is the mean over the sequence. The loss belongs to the sequence: each of its n tokens carries it times
    (n + 1e-8) / n, so that under `seq-mean-token-mean`, and only there, the weighted sum is exactly the mean over
    sequences. verl's mean counts sequences without tokens too; give `aggregate` their number to get the same.
    """
    ratio_NT = log_ratio(logprobs_NT, old_logprobs_NT)
    above, below = ratio_NT.clamp(max=clip_high), ratio_NT.clamp(min=-clip_low)
    clipped_NT = torch.where(advantages_NT > 0, above, torch.where(advantages_NT < 0, below, 0.0))
    loss_N = -row_mean(advantages_NT, mask_NT) * torch.exp(row_mean(clipped_NT, mask_NT))
    tokens_N = mask_NT.sum(-1).clamp(min=1).to(loss_N.dtype)
    loss_NT = (loss_N * (tokens_N + EPSILON) / tokens_N)[:, None].expand(mask_NT.shape)
    return loss_NT, (advantages_NT != 0) & (clipped_NT != ratio_NT)
