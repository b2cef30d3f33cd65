"""CISPO (arXiv:2506.13585): the ratio is clipped and held constant, so clipped tokens still give a gradient."""

from __future__ import annotations

from torch import Tensor

from ullage.algorithms import TokenLoss, ppo
from ullage.batch.stages import TrainBatch
from ullage.maths import losses

CREDIT = "grpo"


class Loss(ppo.Loss):
    """REINFORCE weighted by the clipped ratio."""

    def __call__(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        loss, clipped = losses.cispo(
            logprobs_NT,
            old_logprobs_NT,
            batch.advantages_NT,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        return TokenLoss(loss, {"actor/clip_fraction": clipped})
