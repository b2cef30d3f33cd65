"""Dr. GRPO (arXiv:2503.20783): GRPO without the two divisions that favour long wrong answers and easy questions."""

from __future__ import annotations

from ullage.algorithms import grpo
from ullage.config.tree import Config

LOSS = "ppo"
AGGREGATION = "seq-mean-token-sum-norm"


class Credit(grpo.Credit):
    """Rewards less the group's mean, never divided by the deviation."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.divide_by_std = False
