"""Config -> objects: the only place that knows every room."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ullage.algorithms import Algorithm
from ullage.algorithms._compose import compose, name_of
from ullage.base.communicator import Communicator
from ullage.base.errors import ConfigError, ModelError
from ullage.batch.pack import Limits
from ullage.config.tree import Config
from ullage.data.prompts import PromptSet, load_prompts
from ullage.data.sampler import Sampler
from ullage.engine.measure import MemoryProbe
from ullage.engine.recompute import recompute_layers
from ullage.model.language_model import LanguageModel
from ullage.model.load import load_model
from ullage.model.target import Target
from ullage.model.value_model import ValueModel, load_value_model, share_trunk
from ullage.rewards.pool import RewardPool
from ullage.rollout.embedded.engine import Engine
from ullage.telemetry.reader import read_run
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.run_directory import RunDirectory, RunInfo
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.collect import Collector
from ullage.trainer.evaluate import Evaluator
from ullage.trainer.generate import Generator
from ullage.trainer.loop import Trainer
from ullage.trainer.schedule import Schedule
from ullage.trainer.state import Keeper
from ullage.trainer.stop import Stop
from ullage.workers.actor import Actor
from ullage.workers.critic import Critic
from ullage.workers.reference import Reference

AUTO_TOKENS = 8192
"""Tokens of one pass where the config leaves it to us and sequences are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a run is given rather than makes: where it runs, where it writes, who else is there."""

    config: Config
    directory: RunDirectory
    target: Target
    ranks: Communicator
    recorder: Recorder
    writer: MetricsWriter
    probe: MemoryProbe
    stop: Stop
    closing: ExitStack
    """Closes what a run opens, when it ends."""


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


def open_model(config: Config, target: Target, *, weights: Path | None = None) -> LanguageModel:
    """The model of the config, or the same model with the weights of a checkpoint."""
    wanted = config.actor_rollout_ref.model
    return load_model(
        str(weights) if weights else wanted.path,
        target,
        dtype=wanted.dtype,
        tokenizer_path=wanted.tokenizer_path,
        chat_template=wanted.custom_chat_template,
    )


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


def make_limits(config: Config, model: LanguageModel) -> Limits:
    actor = config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = actor.ppo_max_token_len_per_gpu
    # The varlen kernel has no shared prefix; block attention has, and is exact for every supported architecture.
    share = actor.share_prompt_prefix
    return Limits(
        max_tokens=max(AUTO_TOKENS, longest) if tokens == "auto" else tokens,
        max_sequences=actor.ppo_micro_batch_size_per_gpu,
        share_prefix=not model.target.varlen_attention(model.dtype) if share == "auto" else share,
    )


def make_actor(config: Config, model: LanguageModel, ranks: Communicator, recorder: Recorder) -> Actor:
    arr = config.actor_rollout_ref
    if recomputes(config, model.target):
        recompute_layers(model.layers)
    limits = make_limits(config, model)
    return Actor(
        model,
        arr.actor,
        limits,
        ranks,
        temperature=arr.rollout.temperature,
        seed=config.trainer.seed,
        phase=recorder.phase,
    )


def recomputes(config: Config, target: Target) -> bool:
    recompute = config.actor_rollout_ref.model.enable_gradient_checkpointing
    return target.kind == "cuda" if recompute == "auto" else recompute


def make_critic(given: Surroundings, algorithm: Algorithm, actor: Actor) -> Critic | None:
    """The critic, where the algorithm needs one or the config asks for one."""
    config, critic = given.config, given.config.critic
    needed = "critic" in algorithm.needs
    if needed and critic.enable is False:
        raise ConfigError("critic.enable = false: the algorithm needs a critic", "leave it out, or use algorithm=grpo")
    if not needed and not critic.enable:
        return None
    limits = actor.limits
    if critic.ppo_max_token_len_per_gpu != "auto":
        limits = Limits(max_tokens=critic.ppo_max_token_len_per_gpu, share_prefix=limits.share_prefix)
    return Critic(
        share_trunk(actor.model) if critic.share_actor else open_value_model(config, actor.model),
        critic,
        limits,
        given.ranks,
        max_nonfinite_steps=config.actor_rollout_ref.actor.max_nonfinite_steps,
        phase=given.recorder.phase,
    )


def open_value_model(config: Config, actor_model: LanguageModel) -> ValueModel:
    """The critic's own model. It reads the actor's token ids, so it must know all of them."""
    path, target = config.critic.model.path or config.actor_rollout_ref.model.path, actor_model.target
    try:
        model = load_value_model(path, target, dtype=config.actor_rollout_ref.model.dtype)
    except ModelError as error:
        raise ModelError(f"the critic's model: {error.cause}", "check critic.model.path") from error
    known, used = (trunk.module.config.get_text_config().vocab_size for trunk in (model.trunk, actor_model))
    if known < used:
        raise ModelError(
            f"the critic's model {path} knows {known} tokens, the actor's {used}",
            "set critic.model.path to a model with the actor's tokenizer",
        )
    if recomputes(config, target):
        recompute_layers(model.trunk.layers)
    return model


def make_reference(config: Config, target: Target, actor_limits: Limits, recorder: Recorder) -> Reference:
    arr = config.actor_rollout_ref
    tokens = arr.ref.log_prob_max_token_len_per_gpu
    limits = actor_limits if tokens == "auto" else Limits(max_tokens=tokens, share_prefix=actor_limits.share_prefix)
    model = open_model(config, target)
    return Reference(model, limits, temperature=arr.rollout.temperature, phase=recorder.phase)


def make_evaluator(config: Config, val: PromptSet, generator: Generator, given: Surroundings) -> Evaluator:
    full_marks = sum(max(function.weight, 0.0) for function in config.reward.functions)
    return Evaluator(config, val.prompts, generator, given.ranks, given.writer, full_marks=full_marks)


def register_memory(probe: MemoryProbe, actor: Actor, critic: Critic | None, engine: Engine) -> None:
    """Owners that live as long as the run, under the names every memory report uses."""
    weights = [parameter.nbytes for parameter in actor.model.module.parameters()]
    owned = [actor.optimizer.nbytes()]
    if critic:
        weights += [parameter.nbytes for _, parameter in critic.model.named_parameters()]
        owned.append(critic.optimizer.nbytes())
    probe.register("weights", sum(weights))
    for name in owned[0]:
        probe.register(name, sum(part[name] for part in owned))
    probe.register("kv_cache", engine.nbytes)


def derivation(config: Config, num_ranks: int) -> str:
    """How the batch words of the config combine, in one line."""
    prompts, samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size or prompts
    updates = math.ceil(prompts / mini) * config.actor_rollout_ref.actor.ppo_epochs
    return (
        f"each step: {prompts} prompts x {samples} samples = {prompts * samples} sequences on {num_ranks} rank(s), "
        f"{updates} optimizer update(s) of {mini} prompts"
    )
