"""Config -> objects: the only place that knows every room."""

from __future__ import annotations

import math
import time
from pathlib import Path

from ullage.algorithms._compose import compose, name_of
from ullage.config.tree import Config
from ullage.data.prompts import PromptSet, load_prompts
from ullage.data.sampler import Sampler
from ullage.model.language_model import LanguageModel
from ullage.rewards.pool import RewardPool
from ullage.rollout.embedded.engine import Engine
from ullage.run.roles import make_actor, make_critic, make_reference, open_model, register_memory
from ullage.run.surroundings import Surroundings
from ullage.telemetry.reader import read_run
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.run_directory import RunInfo
from ullage.trainer.collect import Collector
from ullage.trainer.evaluate import Evaluator
from ullage.trainer.generate import Generator
from ullage.trainer.loop import Trainer
from ullage.trainer.schedule import Schedule
from ullage.trainer.state import Keeper


def assemble(given: Surroundings, resume_from: Path | None) -> Trainer:
    """Everything a run needs, from its config or, for what changes, from a checkpoint."""
    config, ranks, recorder = given.config, given.ranks, given.recorder
    algorithm = compose(config)
    pool = open_pool(given)  # its workers start while the model is read
    model = open_model(config, given.target, weights=resume_from and resume_from / "model")
    train, val = open_data(config, model)
    for prompts in filter(None, (train, val)):
        report_overlong(prompts, recorder)
    sampler = Sampler(
        len(train.prompts),
        config.data.train_batch_size,
        seed=config.trainer.seed if config.data.seed is None else config.data.seed,
        shuffle=config.data.shuffle,
    )
    samples = max(config.data.train_batch_size * config.actor_rollout_ref.rollout.n, num_evaluated(config, val))
    engine = make_engine(config, model, prompt_tokens=longest_prompt(train, val), samples=samples)
    generator = Generator(engine, pool, model.tokenizer, config.reward, recorder, ranks, given.stop.poll)
    actor = make_actor(config, model, ranks, recorder)
    critic = make_critic(given, algorithm, actor)
    facts = {"data_fingerprint": train.fingerprint, "model_type": model.module.config.model_type}
    keep = config.trainer.max_ckpt_to_keep
    keeper = Keeper(
        given.directory, actor, sampler, recorder, ranks, algorithm=algorithm, critic=critic, keep=keep, facts=facts
    )
    if resume_from is not None:
        keeper.restore(resume_from)
        recorder.current_step = keeper.step
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * sampler.batches_per_epoch
    uses_reference = config.actor_rollout_ref.actor.use_kl_loss or "reference" in algorithm.needs
    trainer = Trainer(
        config=config,
        total_steps=total_steps,
        actor=actor,
        critic=critic,
        reference=make_reference(config, given.target, actor.limits, recorder) if uses_reference else None,
        algorithm=algorithm,
        collector=Collector(config, train.prompts, sampler, generator, algorithm, ranks, recorder, given.writer),
        evaluator=make_evaluator(config, val, generator, given) if val else None,
        schedule=Schedule(config, algorithm.aggregation, ranks),
        keeper=keeper,
        recorder=recorder,
        ranks=ranks,
        stop=given.stop,
    )
    register_memory(given.probe, actor, critic, engine)
    announce(given, total_steps)
    return trainer


def open_pool(given: Surroundings) -> RewardPool:
    pool = RewardPool(given.config.reward)
    given.closing.callback(pool.close)
    for line in pool.descriptions:
        given.recorder.event(f"reward function {line}")
    return pool


def announce(given: Surroundings, total_steps: int) -> None:
    """Tell readers and views what this run is."""
    config, directory = given.config, given.directory
    given.recorder.event(derivation(config, given.ranks.size))
    info = RunInfo(
        name=directory.name,
        algorithm=name_of(config),
        model=Path(config.actor_rollout_ref.model.path).name,
        total_steps=total_steps,
        created_at=read_run(directory.path).created_at or time.time(),
        capacity_bytes=given.target.memory_bytes,
    )
    if given.ranks.rank == 0:
        directory.write_info(info)
    given.recorder.start(info)


def open_data(config: Config, model: LanguageModel) -> tuple[PromptSet, PromptSet | None]:
    data = config.data
    train = load_prompts(data.train_files, data, model.tokenizer, max_samples=data.train_max_samples)
    if not data.val_files:
        return train, None
    return train, load_prompts(data.val_files, data, model.tokenizer, max_samples=data.val_max_samples)


def report_overlong(prompts: PromptSet, recorder: Recorder) -> None:
    if prompts.num_overlong:
        done = "dropped" if prompts.overlong == "drop" else f"truncated ({prompts.overlong})"
        recorder.event(f"{prompts.num_overlong} of {prompts.num_rows} prompts over data.max_prompt_length: {done}")


def longest_prompt(*sets: PromptSet | None) -> int:
    return max(len(prompt.token_ids) for prompts in sets if prompts for prompt in prompts.prompts)


def num_evaluated(config: Config, val: PromptSet | None) -> int:
    return len(val.prompts) * config.actor_rollout_ref.rollout.val_kwargs.n if val else 0


def make_engine(config: Config, model: LanguageModel, *, prompt_tokens: int, samples: int) -> Engine:
    """No more slots than samples ever wait for one, no more room per slot than the longest prompt needs."""
    rollout = config.actor_rollout_ref.rollout
    return Engine(
        model,
        slots=min(rollout.max_num_seqs, samples),
        max_length=prompt_tokens + config.data.max_response_length,
        cache_tokens=None if rollout.kv_cache_tokens == "auto" else rollout.kv_cache_tokens,
    )


def make_evaluator(config: Config, val: PromptSet, generator: Generator, given: Surroundings) -> Evaluator:
    full_marks = sum(max(function.weight, 0.0) for function in config.reward.functions)
    return Evaluator(config, val.prompts, generator, given.ranks, given.writer, full_marks=full_marks)


def derivation(config: Config, num_ranks: int) -> str:
    """How the batch words of the config combine, in one line."""
    prompts, samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size or prompts
    updates = math.ceil(prompts / mini) * config.actor_rollout_ref.actor.ppo_epochs
    return (
        f"each step: {prompts} prompts x {samples} samples = {prompts * samples} sequences on {num_ranks} rank(s), "
        f"{updates} optimizer update(s) of {mini} prompts"
    )
