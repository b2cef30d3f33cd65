"""PPO (arXiv:1707.06347): generalised advantage estimation with a critic, and the clipped loss.

The clip may differ below and above 1 (DAPO's clip-higher), and a dual clip bounds the loss of bad samples
(arXiv:1912.09729).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ullage.algorithms import Assigned, TokenLoss
from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience, TrainBatch
from ullage.config.tree import Config
from ullage.maths import advantages_token, losses, masked


class Credit:
    """GAE (arXiv:1506.02438) over the response tokens, whitened over the whole step and all ranks."""

    needs: ClassVar[frozenset[str]] = frozenset({"critic"})

    def __init__(self, config: Config) -> None:
        self.gamma = config.algorithm.gamma
        self.lam = config.algorithm.lam

    def has_signal(self, experience: Experience) -> Tensor:
        return experience.valid_N  # the critic learns from every sample, and whitening moves every advantage

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        values, mask = experience.values_NT, experience.mask_NT
        assert values is not None, "a run whose credit needs a critic has one"
        advantages, returns = advantages_token.gae(
            rewards_NT, values.to(rewards_NT.dtype), mask, gamma=self.gamma, lam=self.lam
        )
        return Assigned(masked.whitened(advantages, mask, ranks), returns)


class Loss:
    """The clipped surrogate."""

    def __init__(self, config: Config) -> None:
        actor = config.actor_rollout_ref.actor
        self.clip_low = actor.clip_ratio_low or actor.clip_ratio
        self.clip_high = actor.clip_ratio_high or actor.clip_ratio
        self.dual_clip = actor.clip_ratio_c

    def __call__(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        loss, clipped = losses.clipped_surrogate(
            logprobs_NT,
            old_logprobs_NT,
            batch.advantages_NT,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        return TokenLoss(loss, {"actor/clip_fraction": clipped})
