"""REINFORCE++ (arXiv:2501.03262): discounted returns, whitened over the whole step, PPO's clipped loss, no critic."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ullage.algorithms import Assigned
from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience
from ullage.config.tree import Config
from ullage.maths import advantages_token

LOSS = "ppo"


class Credit:
    """Returns of each token, whitened."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        self.gamma = config.algorithm.gamma

    def has_signal(self, experience: Experience) -> Tensor:
        return experience.valid_N  # whitening moves every advantage

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        return Assigned(
            *advantages_token.reinforce_plus_plus(rewards_NT, experience.mask_NT, gamma=self.gamma, ranks=ranks)
        )
