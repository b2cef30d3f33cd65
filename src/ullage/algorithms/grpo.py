"""GRPO (arXiv:2402.03300): advantages relative to the group's other samples, PPO's clipped loss, no critic.

Left out: the KL term in the loss, which every algorithm shares and the actor adds where `use_kl_loss` is set.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ullage.algorithms import Assigned
from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience
from ullage.config.tree import Config
from ullage.maths import advantages

LOSS = "ppo"


class Credit:
    """Group-normalised rewards as advantages."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        self.divide_by_std = config.algorithm.norm_adv_by_std_in_grpo

    def has_signal(self, experience: Experience) -> Tensor:
        return advantages.group_has_signal(experience.rewards_N, experience.group_N, experience.valid_N)

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        del ranks  # a group never leaves its rank
        advantage_N = advantages.group_relative(
            rewards_NT.sum(-1), experience.group_N, experience.valid_N, divide_by_std=self.divide_by_std
        )
        return Assigned(advantage_N[:, None] * experience.mask_NT)
