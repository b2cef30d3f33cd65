"""The roles of a run from its config: actor, critic, reference."""

from __future__ import annotations

from pathlib import Path

from ullage.algorithms import Algorithm
from ullage.base.communicator import Communicator
from ullage.base.errors import ConfigError, ModelError
from ullage.batch.pack import Limits
from ullage.config.tree import Config
from ullage.engine.measure import MemoryProbe
from ullage.engine.recompute import recompute_layers
from ullage.model.language_model import LanguageModel
from ullage.model.load import load_model
from ullage.model.target import Target
from ullage.model.value_model import ValueModel, load_value_model, share_trunk
from ullage.rollout.embedded.engine import Engine
from ullage.run.surroundings import Surroundings
from ullage.telemetry.recorder import Recorder
from ullage.workers.actor import Actor
from ullage.workers.critic import Critic
from ullage.workers.reference import Reference

AUTO_TOKENS = 8192
"""Tokens of one pass where the config leaves it to us and sequences are shorter."""


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
