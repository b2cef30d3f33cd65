"""GRPO (arXiv:2402.03300): advantages relative to the group's other samples, PPO's clipped loss, no critic.

Left out: the KL term in the loss, which every algorithm shares and the actor adds where `use_kl_loss` is set.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ullage.algorithms import TokenLoss
from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience, TrainBatch
from ullage.config.tree import Config
from ullage.maths import advantages, losses


class Algorithm:
    """Group-normalised rewards as advantages."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        actor = config.actor_rollout_ref.actor
        self.divide_by_std = config.algorithm.norm_adv_by_std_in_grpo
        self.clip_low = actor.clip_ratio_low or actor.clip_ratio
        self.clip_high = actor.clip_ratio_high or actor.clip_ratio
        self.dual_clip = actor.clip_ratio_c

    def has_signal(self, experience: Experience) -> Tensor:
        return advantages.group_has_signal(experience.rewards_N, experience.group_N, experience.valid_N)

    def assign_credit(self, experience: Experience, ranks: Communicator) -> TrainBatch:
        del ranks  # a group never leaves its rank
        advantage_N = advantages.group_relative(
            experience.rewards_N, experience.group_N, experience.valid_N, divide_by_std=self.divide_by_std
        )
        return experience.credited(advantages_NT=advantage_N[:, None] * experience.mask_NT)

    def policy_loss(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        loss, clipped = losses.clipped_surrogate(
            logprobs_NT,
            old_logprobs_NT,
            batch.advantages_NT,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        return TokenLoss(loss, {"actor/clip_fraction": clipped, "actor/kl_old": old_logprobs_NT - logprobs_NT})
