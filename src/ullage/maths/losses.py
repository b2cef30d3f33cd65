"""Policy losses per token; masks and denominators are applied by `aggregate`."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before the exponential, as verl does, so that one absurd token cannot overflow."""


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
    (arXiv:1912.09729 eq. 5).
    """
    ratio = torch.exp((logprobs_NT - old_logprobs_NT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    unclipped = -advantages_NT * ratio
    clipped = -advantages_NT * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, clipped)
    bounded = torch.minimum(loss, -advantages_NT * dual_clip)
    return torch.where(advantages_NT < 0, bounded, loss), clipped > unclipped
