"""What depends on where a prompt comes from: its share of the batches, the rewards it gets, its full marks."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from ullage.base.errors import ConfigError
from ullage.config.tree import Config, RewardFunction
from ullage.data.curriculum import Curriculum
from ullage.data.mixture import Mixture
from ullage.data.prompts import Prompt
from ullage.data.sampler import PromptSampler, Sampler
from ullage.rewards.pool import scores_source


def make_sampler(config: Config, prompts: Sequence[Prompt]) -> PromptSampler:
    """By mixing weights where there are any, with a curriculum where it is asked for."""
    data, size = config.data, config.data.train_batch_size
    seed = config.trainer.seed if data.seed is None else data.seed
    if data.mixing_weights:
        rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows.setdefault(prompt.source, []).append(row)
        weights = data.mixing_weights
        return Mixture(rows, weights, size, seed=seed, shuffle=data.shuffle, curriculum=data.curriculum)
    kind = Curriculum if data.curriculum else Sampler
    return kind(len(prompts), size, seed=seed, shuffle=data.shuffle)


def sources_of(prompts: Sequence[Prompt]) -> list[str]:
    """Each source once, in the order of the data."""
    return list(dict.fromkeys(prompt.source for prompt in prompts))


def check_rewards(config: Config, sources: Collection[str]) -> None:
    """ConfigError where a reward function is for a source that the data does not have, or a source has no reward."""
    for index, function in enumerate(config.reward.functions):
        for name in function.sources:
            if name not in sources:
                near = difflib.get_close_matches(name, sources, n=1)
                hint = f"did you mean '{near[0]}'? " if near else ""
                raise ConfigError(
                    f"reward.functions[{index}].sources: no prompt is of the source '{name}'",
                    f"{hint}The data has {', '.join(sources)}",
                )
    refuse_unscored(config, sources)


def refuse_unscored(config: Config, sources: Collection[str]) -> None:
    """ConfigError where nothing says what an answer is worth."""
    functions = config.reward.functions
    if not functions or config.reward_model.enable or config.environment.name:
        return
    unscored = [name for name in sources if not any(scores_source(function, name) for function in functions)]
    if unscored:
        raise ConfigError(
            f"no reward function scores the source(s) {', '.join(unscored)}",
            "name each in the sources of one of reward.functions, or leave sources out where a function is for all",
        )


def full_marks(config: Config, sources: Collection[str]) -> dict[str, float]:
    """What the best answer to a prompt of each source earns; empty where a reward has no highest.

    A reward function says 1 to it, or 0 where it is a penalty; where no function scores, an environment says 1.
    """
    if config.reward_model.enable:
        return {}
    highest: dict[str, float] = {}
    for name in sources:
        own = [_highest(function) for function in config.reward.functions if scores_source(function, name)]
        highest[name] = sum(own) if own else 1.0
    return highest


def _highest(function: RewardFunction) -> float:
    is_penalty = function.weight < 0 or (function.path is None and function.name == "length")
    return 0.0 if is_penalty else function.weight
