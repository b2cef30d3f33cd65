"""Pass@k training (arXiv:2503.19595): only the best sample of a group is credited, by its lead over the second."""

from __future__ import annotations

from torch import Tensor

from ullage.algorithms import Assigned, grpo
from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience
from ullage.maths import advantages

LOSS = "ppo"


class Credit(grpo.Credit):
    """The lead of the best."""

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        del ranks
        advantage_N = advantages.grpo_passk(
            rewards_NT.sum(-1), experience.group_N, experience.valid_N, divide_by_std=self.divide_by_std
        )
        return Assigned(advantage_N[:, None] * experience.mask_NT)
