"""ReMax (arXiv:2310.10505): REINFORCE with the reward of one greedy answer to the same prompt as baseline."""

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
    """Return less the greedy answer's reward."""

    needs: ClassVar[frozenset[str]] = frozenset({"greedy_baseline"})

    def __init__(self, config: Config) -> None:
        del config

    def has_signal(self, experience: Experience) -> Tensor:
        return experience.valid_N & (experience.rewards_N != self._baseline(experience))

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        del ranks
        return Assigned(*advantages_token.remax(rewards_NT, self._baseline(experience), experience.mask_NT))

    @staticmethod
    def _baseline(experience: Experience) -> Tensor:
        assert experience.baseline_G is not None, "a run whose credit needs a greedy baseline samples one"
        return experience.baseline_G[experience.group_N]
