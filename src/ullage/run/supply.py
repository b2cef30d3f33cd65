"""Where a run's experience comes from: answers it samples and scores, or answers that the data gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ullage.algorithms import Algorithm
from ullage.config.check import is_rewarded
from ullage.config.settle import choices_of
from ullage.config.tree import Config
from ullage.data.completions import Demonstration, demonstrations_of
from ullage.data.prompts import PromptSet, load_prompts
from ullage.data.sampler import PromptSampler
from ullage.environments._pool import EnvironmentPool
from ullage.model.language_model import LanguageModel
from ullage.planner.drawing import cache_tokens, sharing
from ullage.rewards.panel import Panel
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.graphs import Capturing
from ullage.run.environment import open_environment, with_episodes, with_tools
from ullage.run.roles import make_reward_model
from ullage.run.sources import check_rewards, full_marks, make_sampler, sources_of
from ullage.run.surroundings import Surroundings
from ullage.telemetry.recorder import Recorder
from ullage.trainer.collect import Collector
from ullage.trainer.demonstrate import DemonstrationCollector, LossEvaluator
from ullage.trainer.evaluate import Evaluator
from ullage.trainer.generate import Generator, SampleSource
from ullage.workers.actor import Actor


class Scorers(NamedTuple):
    """What says how good an answer is, in processes of its own."""

    panel: Panel
    environment: EnvironmentPool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What the loop draws from, and what it is measured on."""

    sampler: PromptSampler
    collector: Collector | DemonstrationCollector
    evaluator: Evaluator | LossEvaluator | None
    engine: Engine | None
    """None where nothing is ever sampled."""
    fingerprint: str
    """Of the training data."""


def open_scorers(given: Surroundings) -> Scorers:
    """Before the model is read, so that the processes start meanwhile and a bad reward is refused at once."""
    return Scorers(open_panel(given), open_environment(given))


def supply_samples(given: Surroundings, scorers: Scorers, actor: Actor, algorithm: Algorithm) -> Supply:
    """Prompts that the actor answers and the scorers judge."""
    config, model = given.config, actor.model
    train, val = open_data(with_tools(config, scorers.environment), model)
    for prompts in filter(None, (train, val)):
        report_overlong(prompts, given.recorder)
    check_rewards(config, sources_of((*train.prompts, *(val.prompts if val else ()))))
    sampler = make_sampler(config, train.prompts)
    samples = max(config.data.train_batch_size * config.actor_rollout_ref.rollout.n, num_evaluated(config, val))
    engine = make_engine(
        config,
        model,
        prompt_tokens=longest_prompt(train, val),
        samples=samples,
        n=config.actor_rollout_ref.rollout.n,
        lent=actor.optimizer.lendable,
        say=given.recorder.event,
    )
    source = make_source(given, scorers, engine, model)
    collector = Collector(
        config,
        train.prompts,
        sampler,
        source,
        algorithm,
        given.ranks,
        given.recorder,
        given.writer,
        full_marks=full_marks(config, sources_of(train.prompts)) if config.data.curriculum else None,
    )
    return Supply(
        sampler=sampler,
        collector=collector,
        evaluator=make_evaluator(config, val, source, given) if val else None,
        engine=engine,
        fingerprint=train.fingerprint,
    )


def supply_answers(given: Surroundings, scorers: Scorers, actor: Actor, algorithm: Algorithm) -> Supply:
    """Prompts whose answers the data gives; held-out ones are also sampled and scored, where there is a reward."""
    del algorithm
    config, model = given.config, actor.model
    train, val = open_data(config, model)
    for prompts in filter(None, (train, val)):
        report_overlong(prompts, given.recorder)
    demonstrations = open_demonstrations(given, train, model)
    sampler = make_sampler(config, [demonstration.prompt for demonstration in demonstrations])
    engine = evaluator = None
    if val:
        rewards = None
        if is_rewarded(config):
            check_rewards(config, sources_of(val.prompts))
            engine = make_engine(
                config,
                model,
                prompt_tokens=longest_prompt(val),
                samples=num_evaluated(config, val),
                n=config.actor_rollout_ref.rollout.val_kwargs.n,
                say=given.recorder.event,
            )
            rewards = make_evaluator(config, val, make_source(given, scorers, engine, model), given)
        held_out = open_demonstrations(given, val, model)
        evaluator = LossEvaluator(held_out, actor, given.ranks, given.recorder, rewards=rewards)
    return Supply(
        sampler=sampler,
        collector=DemonstrationCollector(demonstrations, sampler, given.ranks),
        evaluator=evaluator,
        engine=engine,
        fingerprint=train.fingerprint,
    )


def make_source(given: Surroundings, scorers: Scorers, engine: Engine, model: LanguageModel) -> SampleSource:
    """What answers prompts and scores the answers: in one turn, or in episodes with an environment."""
    return with_episodes(given, scorers.environment, make_generator(given, engine, scorers.panel, model), model)


def open_panel(given: Surroundings) -> Panel:
    panel = Panel(given.config.reward)
    given.closing.callback(panel.close)
    for line in panel.descriptions:
        given.recorder.event(f"reward function {line}")
    return panel


def make_generator(given: Surroundings, engine: Engine, panel: Panel, model: LanguageModel) -> Generator:
    config = given.config
    reward_model = make_reward_model(config, given.target, given.replays, ahead=given.ahead)
    if reward_model is not None:
        weights = reward_model.module.parameters()
        here = [weight.nbytes for weight in weights if weight.device.type == given.target.device.type]
        given.probe.register("reward_model", sum(here))  # none of them where they wait in host memory
    return Generator(
        engine,
        panel,
        model.tokenizer,
        config.reward,
        given.recorder,
        given.ranks,
        given.stop.poll,
        reward_model=reward_model,
        reward_model_weight=config.reward_model.weight,
        replays=given.replays,
    )


def open_data(config: Config, model: LanguageModel) -> tuple[PromptSet, PromptSet | None]:
    data = config.data
    train = load_prompts(data.train_files, data, model.tokenizer, max_samples=data.train_max_samples)
    if not data.val_files:
        return train, None
    return train, load_prompts(data.val_files, data, model.tokenizer, max_samples=data.val_max_samples)


def open_demonstrations(given: Surroundings, prompts: PromptSet, model: LanguageModel) -> tuple[Demonstration, ...]:
    data = given.config.data
    found = demonstrations_of(prompts.prompts, data, model.tokenizer, model.stop_ids)
    if found.num_overlong:
        done = "dropped" if data.overlong_prompts == "drop" else "cut"
        given.recorder.event(f"{found.num_overlong} answers over data.max_response_length: {done}")
    return found.demonstrations


def report_overlong(prompts: PromptSet, recorder: Recorder) -> None:
    if prompts.num_overlong:
        done = "dropped" if prompts.overlong == "drop" else f"truncated ({prompts.overlong})"
        recorder.event(f"{prompts.num_overlong} of {prompts.num_rows} prompts over data.max_prompt_length: {done}")


def longest_prompt(*sets: PromptSet | None) -> int:
    return max(len(prompt.token_ids) for prompts in sets if prompts for prompt in prompts.prompts)


def num_evaluated(config: Config, val: PromptSet | None) -> int:
    return len(val.prompts) * config.actor_rollout_ref.rollout.val_kwargs.n if val else 0


def make_engine(
    config: Config,
    model: LanguageModel,
    *,
    prompt_tokens: int,
    samples: int,
    n: int,
    lent: Tensor | None = None,
    capture: Capturing | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Engine:
    """No more slots than samples ever wait for one, no more room than they need where n begin alike.

    Where fewer do, as in an evaluation between steps, some wait.
    """
    rollout, response = config.actor_rollout_ref.rollout, config.data.max_response_length
    slots = min(choices_of(config).slots, samples)
    room = cache_tokens(slots=slots, samples=samples, n=sharing(config, n), prompt=prompt_tokens, response=response)
    return Engine(
        model,
        slots=slots,
        max_length=prompt_tokens + response,
        cache_tokens=room if rollout.kv_cache_tokens == "auto" else rollout.kv_cache_tokens,
        lent=lent,
        deterministic=rollout.deterministic,
        capture=capture,
        say=say,
    )


def make_evaluator(config: Config, val: PromptSet, generator: SampleSource, given: Surroundings) -> Evaluator:
    marks = full_marks(config, sources_of(val.prompts))
    return Evaluator(config, val.prompts, generator, given.ranks, given.writer, full_marks=marks)
