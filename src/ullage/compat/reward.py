"""`RewardModel`: the score that a classifier gives an answer, without a run around it."""

from __future__ import annotations

from ullage.base.errors import ConfigError, DataError
from ullage.compat.given import Given, Settings, read
from ullage.config.settle import plainly, with_key
from ullage.model.target import find_target
from ullage.run.roles import make_reward_model


class RewardModel:
    """The classifier with one output that `reward_model.model.path` names."""

    def __init__(self, config: Given) -> None:
        tree = read(config).config
        self.config = Settings(tree)
        if not tree.reward_model.model.path:
            raise ConfigError(
                "reward_model.model.path: no reward model", "give a folder or a Hub id of a classifier with one label"
            )
        target = find_target(tree.trainer.device, 0)
        role = make_reward_model(plainly(with_key(tree, "reward_model.enable", True), target.kind), target)
        assert role is not None, "asked for"
        self.role = role

    def compute_reward(self, prompt: str, response: str) -> float:
        """What the model thinks of this answer; DataError where it cannot read it."""
        [score] = self.role.scores([prompt], [response])
        if isinstance(score, str):
            raise DataError(score, "shorten the prompt or the response")
        return score
