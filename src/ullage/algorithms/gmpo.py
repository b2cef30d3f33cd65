"""GMPO (arXiv:2507.20673): the geometric mean of a sequence's token ratios, each clipped first."""

from __future__ import annotations

from torch import Tensor

from ullage.algorithms import TokenLoss
from ullage.batch.stages import TrainBatch
from ullage.config.tree import Config
from ullage.maths import losses

CREDIT = "grpo"
AGGREGATION = "seq-mean-token-mean"
ONLY_AGGREGATION = True
CLIP = 0.4
"""The paper's, on log-ratios; used where the config gives neither clip_ratio_low nor clip_ratio_high."""


class Loss:
    """Sequence ratio by geometric mean."""

    def __init__(self, config: Config) -> None:
        actor = config.actor_rollout_ref.actor
        self.clip_low = actor.clip_ratio_low or CLIP
        self.clip_high = actor.clip_ratio_high or CLIP

    def __call__(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        loss, clipped = losses.geo_mean(
            logprobs_NT,
            old_logprobs_NT,
            batch.advantages_NT,
            batch.mask_NT,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        return TokenLoss(loss, {"actor/clip_fraction": clipped})
