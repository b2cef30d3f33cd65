"""GDPO (arXiv:2601.05242): each reward function is normalised within its group before they are added up.

Where one function has a much larger spread than another, their sum drowns the smaller one; here each speaks as loud as
its weight says.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ullage.algorithms import Assigned
from ullage.base.communicator import Communicator
from ullage.base.errors import ConfigError
from ullage.batch.stages import Experience
from ullage.config.tree import Config
from ullage.maths import advantages_token

LOSS = "ppo"


class Credit:
    """Group-normalised parts, weighted, then whitened."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        if config.algorithm.use_kl_in_reward:
            raise ConfigError(
                "algorithm.use_kl_in_reward = true: gdpo looks at each reward function by itself, not at their sum",
                "leave it out, and set actor_rollout_ref.actor.use_kl_loss=true",
            )
        if config.reward.overlong_buffer is not None:
            raise ConfigError(
                "reward.overlong_buffer: gdpo looks at each reward function by itself, not at their sum",
                "leave it out, and add the reward function `length`",
            )
        self.weights = [function.weight for function in config.reward.functions]
        if config.reward_model.enable:  # its score comes after theirs
            self.weights.append(config.reward_model.weight)
        if config.environment.name:  # and an environment's after it
            self.weights.append(1.0)
        self.divide_by_std = config.algorithm.norm_adv_by_std_in_grpo

    def has_signal(self, experience: Experience) -> Tensor:
        return experience.valid_N  # whitening moves every advantage

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        parts = experience.reward_parts_NK.to(rewards_NT.dtype)
        return Assigned(
            advantages_token.gdpo(
                parts,
                self.weights,
                experience.group_N,
                experience.valid_N,
                experience.mask_NT,
                divide_by_std=self.divide_by_std,
                ranks=ranks,
            )
        )
