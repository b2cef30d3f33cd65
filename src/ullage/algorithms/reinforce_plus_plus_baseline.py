"""REINFORCE++ with a group baseline (arXiv:2501.03262): rewards less the group's mean, whitened over the whole step."""

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
    """Group baseline, then whitening."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        del config

    def has_signal(self, experience: Experience) -> Tensor:
        return experience.valid_N  # whitening moves every advantage

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        return Assigned(
            advantages_token.reinforce_plus_plus_baseline(
                rewards_NT.sum(-1), experience.group_N, experience.valid_N, experience.mask_NT, ranks=ranks
            )
        )
