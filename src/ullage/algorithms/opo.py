"""OPO (arXiv:2505.23585): the optimal baseline weighs each sample's reward by its length."""

from __future__ import annotations

from torch import Tensor

from ullage.algorithms import Assigned, grpo
from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience
from ullage.maths import advantages

LOSS = "ppo"


class Credit(grpo.Credit):
    """Length-weighted group baseline."""

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        del ranks
        advantage_N = advantages.opo(rewards_NT.sum(-1), experience.group_N, experience.valid_N, experience.mask_NT)
        return Assigned(advantage_N[:, None] * experience.mask_NT)
