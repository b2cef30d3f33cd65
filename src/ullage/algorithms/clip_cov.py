"""Clip-Cov (arXiv:2505.22617): a few tokens whose log-prob and advantage vary together are taken out of the loss.

They are the ones that drive entropy down. Which ones is decided on the whole mini-batch, before it is split.
"""

from __future__ import annotations

from torch import Tensor

from ullage.algorithms import TokenLoss, ppo
from ullage.base.communicator import Communicator
from ullage.batch.stages import TrainBatch
from ullage.config.tree import Config
from ullage.maths import covariance

CREDIT = "grpo"


class Loss(ppo.Loss):
    """The clipped surrogate without the selected tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options = config.actor_rollout_ref.actor.policy_loss
        self.fraction = options.clip_cov_ratio
        self.low, self.high = options.clip_cov_lb, options.clip_cov_ub

    def select(self, logprobs_NT: Tensor, batch: TrainBatch, ranks: Communicator, seed: int) -> Tensor:
        old = logprobs_NT if batch.old_logprobs_NT is None else batch.old_logprobs_NT
        return covariance.clip_cov_select(
            logprobs_NT,
            old,
            batch.advantages_NT,
            batch.mask_NT,
            batch.sample_N,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            fraction=self.fraction,
            low=self.low,
            high=self.high,
            seed=seed,
            ranks=ranks,
        )

    def __call__(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        assert batch.selected_NT is not None, "selected before the mini-batch is split"
        loss, stopped = covariance.clip_cov(
            logprobs_NT,
            old_logprobs_NT,
            batch.advantages_NT,
            batch.selected_NT,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        return TokenLoss(loss, {"actor/clip_fraction": stopped})
