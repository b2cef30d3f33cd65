"""KL-Cov (arXiv:2505.22617): the tokens whose log-prob and advantage vary together most pay a KL penalty.

Which ones is decided on the whole mini-batch, before it is split. No clip.
"""

from __future__ import annotations

from torch import Tensor

from ullage.algorithms import TokenLoss
from ullage.base.communicator import Communicator
from ullage.batch.stages import TrainBatch
from ullage.config.tree import Config
from ullage.maths import covariance

CREDIT = "grpo"


class Loss:
    """The plain surrogate, with a penalty on the selected tokens."""

    def __init__(self, config: Config) -> None:
        options = config.actor_rollout_ref.actor.policy_loss
        self.fraction = options.kl_cov_ratio
        self.coefficient = options.ppo_kl_coef

    def select(self, logprobs_NT: Tensor, batch: TrainBatch, ranks: Communicator, seed: int) -> Tensor:
        del seed  # the largest ones: nothing is drawn
        return covariance.kl_cov_select(
            logprobs_NT, batch.advantages_NT, batch.mask_NT, batch.sample_N, fraction=self.fraction, ranks=ranks
        )

    def __call__(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        assert batch.selected_NT is not None, "selected before the mini-batch is split"
        loss = covariance.kl_cov(
            logprobs_NT, old_logprobs_NT, batch.advantages_NT, batch.selected_NT, coefficient=self.coefficient
        )
        return TokenLoss(loss, {})
