"""RAFT (arXiv:2304.06767): learn the best answer to each prompt as if it had been given, and ignore the others."""

from __future__ import annotations

import torch
from torch import Tensor

from ullage.algorithms import Assigned, grpo
from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience

LOSS = "gpg"


class Credit(grpo.Credit):
    """1 for the best of a group, all of them where several tie, and 0 for the rest; a group without a best has none."""

    def has_signal(self, experience: Experience) -> Tensor:
        return super().has_signal(experience) & self._is_best(experience.rewards_N, experience)

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        del ranks  # a group never leaves its rank
        chosen_N = super().has_signal(experience) & self._is_best(rewards_NT.sum(-1), experience)
        return Assigned(chosen_N.to(rewards_NT.dtype)[:, None] * experience.mask_NT)

    @staticmethod
    def _is_best(rewards_N: Tensor, experience: Experience) -> Tensor:
        scored_N = torch.where(experience.valid_N, rewards_N, -torch.inf)
        lowest_G = rewards_N.new_full((len(experience.prompts),), -torch.inf)
        best_G = lowest_G.scatter_reduce(0, experience.group_N, scored_N, "amax")
        return experience.valid_N & (scored_N == best_G[experience.group_N])
