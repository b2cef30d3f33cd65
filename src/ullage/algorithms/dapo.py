"""DAPO (arXiv:2503.14476): GRPO with a higher upper clip, and groups without signal replaced by new ones.

Its other two pieces are settings: token-mean aggregation is the default, and the penalty on long answers is
`reward.overlong_buffer`.
"""

from __future__ import annotations

from ullage.algorithms import ppo
from ullage.config.tree import Config

CREDIT = "grpo"
REFILLS = True
CLIP_HIGH = 0.28
"""The paper's; used where the config gives no clip_ratio_high."""


class Loss(ppo.Loss):
    """The clipped surrogate with clip-higher."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.clip_high = config.actor_rollout_ref.actor.clip_ratio_high or CLIP_HIGH
