"""The environment of a run, where the config names one: its worker processes, its tools, its episodes."""

from __future__ import annotations

from ullage.config.tree import Config
from ullage.environments._pool import EnvironmentPool
from ullage.model.language_model import LanguageModel
from ullage.run.surroundings import Surroundings
from ullage.trainer.episodes import Episodes, FollowUp
from ullage.trainer.generate import Generator


def open_environment(given: Surroundings) -> EnvironmentPool | None:
    """Refuses an environment that cannot be built, before any weight is loaded."""
    environment = given.config.environment
    if environment.name is None:
        return None
    pool = EnvironmentPool(given.config)
    given.closing.callback(pool.close)
    given.recorder.event(f"environment {environment.name}, at most {environment.max_turns} turn(s)")
    return pool


def with_tools(config: Config, environment: EnvironmentPool | None) -> Config:
    """The config with the environment's tools among what the chat template is given, unless it already has some."""
    options = config.data.apply_chat_template_kwargs
    if environment is None or not environment.tool_schemas or "tools" in options:
        return config
    options = {**options, "tools": environment.tool_schemas}
    return config.model_copy(update={"data": config.data.model_copy(update={"apply_chat_template_kwargs": options})})


def with_episodes(
    given: Surroundings, environment: EnvironmentPool | None, generator: Generator, model: LanguageModel
) -> Generator | Episodes:
    """The generator, or episodes played with it."""
    if environment is None:
        return generator
    if environment.tool_schemas and "tools" not in str(model.tokenizer.chat_template):
        given.recorder.event("the chat template knows no tools: tell the model of them in data.system_prompt")
    follow_up = FollowUp(model.tokenizer, given.config.data)
    return Episodes(generator, environment, follow_up, max_turns=given.config.environment.max_turns)
