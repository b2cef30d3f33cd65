"""GPG (arXiv:2504.02546): the plain policy gradient, with group baselines and no ratio, clip or critic."""

from __future__ import annotations

from torch import Tensor

from ullage.algorithms import Assigned, TokenLoss, grpo
from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience, TrainBatch
from ullage.config.tree import Config
from ullage.maths import advantages, losses


class Credit(grpo.Credit):
    """Rewards less the group's mean, scaled up by the share of samples that earned anything."""

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        advantage_N = advantages.gpg(rewards_NT.sum(-1), experience.group_N, experience.valid_N, ranks=ranks)
        return Assigned(advantage_N[:, None] * experience.mask_NT)


class Loss:
    """Minus log-prob times advantage."""

    def __init__(self, config: Config) -> None:
        del config

    def __call__(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        del old_logprobs_NT
        return TokenLoss(losses.gpg(logprobs_NT, batch.advantages_NT), {})
