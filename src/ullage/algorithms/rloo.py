"""RLOO (arXiv:2402.14740): REINFORCE with the mean of the group's other samples as baseline."""

from __future__ import annotations

from torch import Tensor

from ullage.algorithms import Assigned, grpo
from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience
from ullage.maths import advantages

LOSS = "ppo"


class Credit(grpo.Credit):
    """Leave-one-out baseline."""

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        del ranks
        advantage_N = advantages.rloo(rewards_NT.sum(-1), experience.group_N, experience.valid_N)
        return Assigned(advantage_N[:, None] * experience.mask_NT)
