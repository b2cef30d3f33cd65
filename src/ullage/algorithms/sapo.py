"""SAPO (arXiv:2511.20347): a soft gate around ratio 1 in place of the clip, tighter for bad samples."""

from __future__ import annotations

from torch import Tensor

from ullage.algorithms import TokenLoss
from ullage.batch.stages import TrainBatch
from ullage.config.tree import Config
from ullage.maths import losses

CREDIT = "grpo"
AGGREGATION = "seq-mean-token-mean"
ONLY_AGGREGATION = True


class Loss:
    """Sigmoid-gated ratio."""

    def __init__(self, config: Config) -> None:
        actor = config.actor_rollout_ref.actor
        self.tau_positive, self.tau_negative = actor.tau_pos, actor.tau_neg

    def __call__(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        loss = losses.sapo(
            logprobs_NT,
            old_logprobs_NT,
            batch.advantages_NT,
            tau_positive=self.tau_positive,
            tau_negative=self.tau_negative,
        )
        return TokenLoss(loss, {})
