"""Scores any weights on held-out prompts, with the evaluation that training uses: same prompts, seeds and rewards."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ullage.base.errors import ConfigError
from ullage.config.check import is_rewarded
from ullage.config.tree import Config
from ullage.data.prompts import load_prompts
from ullage.run.environment import with_tools
from ullage.run.fit import fitting
from ullage.run.roles import open_model
from ullage.run.sources import refuse_unscored, sources_of
from ullage.run.supply import (
    longest_prompt,
    make_engine,
    make_evaluator,
    make_source,
    num_evaluated,
    open_scorers,
    report_overlong,
)
from ullage.run.surroundings import without_a_run
from ullage.telemetry.view import View
from ullage.trainer.evaluate import Evaluation


def evaluate_weights(config: Config, weights: str, view: View) -> Evaluation:
    """Mean@n, pass@k, best@k and maj@k of the weights on `data.val_files`; nothing is written."""
    require_evaluable(config)
    with ExitStack() as closing:
        given = without_a_run(config, closing, [view])
        config = given.config
        scorers = open_scorers(given)
        model = open_model(config, given.target, weights=Path(weights))
        data = with_tools(config, scorers.environment).data
        val = load_prompts(data.val_files, data, model.tokenizer, max_samples=data.val_max_samples)
        report_overlong(val, given.recorder)
        refuse_unscored(config, sources_of(val.prompts))
        with fitting(given):
            engine = make_engine(
                config,
                model,
                prompt_tokens=longest_prompt(val),
                samples=num_evaluated(config, val),
                n=config.actor_rollout_ref.rollout.val_kwargs.n,
            )
            return make_evaluator(config, val, make_source(given, scorers, engine, model), given).evaluate(0)


def require_evaluable(config: Config) -> None:
    """ConfigError unless there are held-out prompts and a reward."""
    if not config.data.val_files:
        raise ConfigError("no held-out data", "give --data FILE, or set data.val_files")
    if not is_rewarded(config):
        raise ConfigError(
            "no reward",
            "give --reward NAME (gsm8k, math, ...) or --reward FILE.py, or set reward.functions or reward_model.enable",
        )
