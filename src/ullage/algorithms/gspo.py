"""GSPO (arXiv:2507.18071): one ratio per sequence, the geometric mean of its tokens' ratios, clipped as a whole.

The ratio of a whole sequence moves far less than a token's, so its clip is smaller by orders of magnitude.
"""

from __future__ import annotations

from torch import Tensor

from ullage.algorithms import TokenLoss
from ullage.batch.stages import TrainBatch
from ullage.config.tree import Config
from ullage.maths import losses

CREDIT = "grpo"
AGGREGATION = "seq-mean-token-mean"


class Loss:
    """The clipped surrogate of the sequence ratio."""

    paper_clip = (3e-4, 4e-4)
    """Used where the config gives no clip_ratio_low or clip_ratio_high; clip_ratio is meant for tokens."""
    surrogate = staticmethod(losses.gspo)
    of_sequence = False

    def __init__(self, config: Config) -> None:
        actor = config.actor_rollout_ref.actor
        low, high = self.paper_clip
        self.clip_low, self.clip_high = actor.clip_ratio_low or low, actor.clip_ratio_high or high

    def __call__(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        loss, clipped = self.surrogate(
            logprobs_NT,
            old_logprobs_NT,
            batch.advantages_NT,
            batch.mask_NT,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        return TokenLoss(loss, {"actor/clip_fraction": clipped}, of_sequence=self.of_sequence)
