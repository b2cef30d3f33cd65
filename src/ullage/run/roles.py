"""The roles of a run from its config: actor, critic, reference, reward model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ullage.algorithms import Algorithm
from ullage.base.communicator import Communicator
from ullage.base.errors import ConfigError, ModelError
from ullage.base.seeds import derive
from ullage.batch.pack import Limits
from ullage.config.settle import PASS_TOKENS, choices_of
from ullage.config.tree import Config
from ullage.engine.measure import MemoryProbe
from ullage.engine.parking import Ahead, Parked
from ullage.engine.replay import Replays
from ullage.model.adapter_files import is_adapter_folder, read_adapter
from ullage.model.language_model import LanguageModel
from ullage.model.load import load_model
from ullage.model.lora import Adapter, Settings, new_adapter
from ullage.model.target import Target
from ullage.model.trunk import Trunk
from ullage.model.value_model import ValueModel, add_value_head, load_value_model, share_trunk
from ullage.rollout.embedded.engine import Engine
from ullage.run.levers import optimizer_levers, prepare_layers, resident_phase
from ullage.workers.actor import Actor
from ullage.workers.critic import Critic
from ullage.workers.passes import Phase
from ullage.workers.reference import Reference
from ullage.workers.reward_model import RewardModel, load_reward_model

Loader = Callable[..., ValueModel]
"""Like `load_value_model`."""


def open_model(config: Config, target: Target, *, weights: Path | None = None) -> LanguageModel:
    """The model of the config, with its adapter if it asks for one; or what the folder of a checkpoint holds."""
    wanted = config.actor_rollout_ref.model
    if weights is None and is_adapter_folder(wanted.path):
        raise ConfigError(
            f"actor_rollout_ref.model.path = {wanted.path}: an adapter, not a model",
            "set it to the model that is adapted, and actor_rollout_ref.model.lora_adapter_path to this folder",
        )
    model = load_model(
        str(weights) if weights else wanted.path,
        target,
        dtype=wanted.dtype,
        tokenizer_path=wanted.tokenizer_path,
        chat_template=wanted.custom_chat_template,
        quantization=None if weights else wanted.quantization,  # a checkpoint knows its own
    )
    if weights is None and (wanted.lora_rank or wanted.lora_adapter_path):
        return model.adapted("actor", actor_adapter(config, model))
    return model


def actor_adapter(config: Config, model: LanguageModel) -> Adapter:
    """The adapter that training starts from: the folder's, or a new one."""
    wanted = config.actor_rollout_ref.model
    if wanted.lora_adapter_path is None:
        return fresh_adapter(config, model, "actor", wanted.lora_rank)
    adapter = read_adapter(Path(wanted.lora_adapter_path).expanduser())
    if wanted.lora_rank not in (0, adapter.settings.rank):
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank = {wanted.lora_rank}: the adapter {wanted.lora_adapter_path} "
            f"has rank {adapter.settings.rank}",
            "leave lora_rank out: rank, alpha and target modules are the adapter's own",
        )
    return adapter


def fresh_adapter(config: Config, trunk: Trunk, role: str, rank: int) -> Adapter:
    wanted, seed = config.actor_rollout_ref.model, derive(config.trainer.seed, "lora", role)
    return new_adapter(trunk.module, Settings(rank=rank, alpha=wanted.lora_alpha), wanted.target_modules, seed)


def make_limits(config: Config) -> Limits:
    actor = config.actor_rollout_ref.actor
    return Limits(max_tokens=choices_of(config).tokens, max_sequences=actor.ppo_micro_batch_size_per_gpu)


def make_actor(
    config: Config, model: LanguageModel, ranks: Communicator, phase: Phase, replays: Replays | None = None
) -> Actor:
    arr = config.actor_rollout_ref
    prepare_layers(model, config)
    limits = make_limits(config)
    return Actor(
        model,
        arr.actor,
        limits,
        ranks,
        temperature=arr.rollout.temperature,
        seed=config.trainer.seed,
        levers=optimizer_levers(config),
        phase=phase,
        replays=replays,
    )


def make_critic(
    config: Config,
    algorithm: Algorithm,
    actor: Actor,
    phase: Phase,
    replays: Replays | None = None,
    *,
    load: Loader = load_value_model,
    ahead: Ahead | None = None,
) -> Critic | None:
    """The critic, where the algorithm needs one or the config asks for one; `load` reads a model of its own."""
    critic = config.critic
    needed = "critic" in algorithm.needs
    if needed and critic.enable is False:
        raise ConfigError("critic.enable = false: the algorithm needs a critic", "leave it out, or use algorithm=grpo")
    if not needed and not critic.enable:
        return None
    limits = actor.limits
    if critic.ppo_max_token_len_per_gpu != "auto":
        limits = Limits(max_tokens=critic.ppo_max_token_len_per_gpu, share_prefix=limits.share_prefix)
    model = share_trunk(actor.model) if critic.share_actor else open_value_model(config, actor.model, load)
    role = Critic(
        model,
        critic,
        limits,
        actor.ranks,
        max_nonfinite_steps=config.actor_rollout_ref.actor.max_nonfinite_steps,
        seed=config.trainer.seed,
        levers=optimizer_levers(config),
        phase=phase,
        replays=replays,
    )
    if model.trunk.module is not actor.model.module:  # after its optimizer has seen where the weights are used
        weights = [*model.trunk.module.parameters(), model.weight, model.bias]
        role.phase = resident_phase(
            phase, ("values", "update_critic"), weights, config, actor.model.target, trained=True, ahead=ahead
        )
    return role


def open_value_model(config: Config, actor_model: LanguageModel, load: Loader = load_value_model) -> ValueModel:
    """The critic's own model, or an adapter of its own on the actor's frozen weights."""
    wanted, target = config.critic.model, actor_model.target
    path = wanted.path or config.actor_rollout_ref.model.path
    if wanted.lora_rank and actor_model.adapters is not None and path == config.actor_rollout_ref.model.path:
        adapter = fresh_adapter(config, actor_model, "critic", wanted.lora_rank)
        return add_value_head(actor_model.adapted("critic", adapter))
    try:
        model = load(
            path,
            target,
            dtype=config.actor_rollout_ref.model.dtype,
            quantization=config.actor_rollout_ref.model.quantization if wanted.lora_rank else None,
        )
    except ModelError as error:
        raise ModelError(f"the critic's model: {error.cause}", "check critic.model.path") from error
    known, used = (trunk.module.config.get_text_config().vocab_size for trunk in (model.trunk, actor_model))
    if known < used:  # it reads the actor's token ids
        raise ModelError(
            f"the critic's model {path} knows {known} tokens, the actor's {used}",
            "set critic.model.path to a model with the actor's tokenizer",
        )
    if wanted.lora_rank:
        adapter = fresh_adapter(config, model.trunk, "critic", wanted.lora_rank)
        model = replace(model, trunk=model.trunk.adapted("critic", adapter))
    prepare_layers(model.trunk, config)
    return model


def make_reference(
    config: Config,
    actor: Actor,
    phase: Phase,
    replays: Replays | None = None,
    *,
    load: Callable[[Config, Target], LanguageModel] = open_model,
    ahead: Ahead | None = None,
) -> Reference:
    """The policy without what training adds: the actor's weights with adapters off, or a copy that `load` reads."""
    arr, limits = config.actor_rollout_ref, actor.limits
    tokens = arr.ref.log_prob_max_token_len_per_gpu
    if tokens != "auto":
        limits = Limits(max_tokens=tokens, share_prefix=limits.share_prefix)
    if actor.model.adapters is not None:
        model = replace(actor.model, adapter=None)
    else:
        model = load(config, actor.model.target)
        weights, target = model.module.parameters(), actor.model.target
        phase = resident_phase(phase, ("reference",), weights, config, target, trained=False, ahead=ahead)
    return Reference(model, limits, temperature=arr.rollout.temperature, phase=phase, replays=replays)


def make_reward_model(
    config: Config, target: Target, replays: Replays | None = None, *, ahead: Ahead | None = None
) -> RewardModel | None:
    """The reward model, where the config asks for one."""
    if not config.reward_model.enable:
        return None
    wanted = config.reward_model.model
    # Another tokenizer may need more tokens for the same text.
    longest = 2 * (config.data.max_prompt_length + config.data.max_response_length)
    try:
        model = load_reward_model(
            wanted.path,
            target,
            tokenizer_path=wanted.tokenizer_path,
            dtype=config.actor_rollout_ref.model.dtype,
            max_tokens=max(PASS_TOKENS, longest),
            replays=replays,
        )
    except ModelError as error:
        raise ModelError(f"the reward model: {error.cause}", "check reward_model.model.path") from error
    if choices_of(config).offload_roles:
        parked = Parked(model.module.parameters(), target.device, trained=False)
        model.resident = parked.here
        if ahead is not None:
            ahead.register("reward", parked)
    return model


def register_memory(
    probe: MemoryProbe, actor: Actor, critic: Critic | None, reference: Reference | None, engine: Engine | None
) -> None:
    """Owners that live as long as the run, under the names every memory report uses."""
    weights: list[Tensor] = [*actor.model.module.parameters()]
    owned = [actor.optimizer.nbytes()]
    if critic:
        weights += [*critic.model.trunk.module.parameters(), critic.model.weight, critic.model.bias]
        owned.append(critic.optimizer.nbytes())
    if reference:
        weights += reference.model.module.parameters()
    # Roles may share weights: each place in memory counts once.
    probe.register("weights", sum({weight.data_ptr(): weight.nbytes for weight in weights}.values()))
    for name in owned[0]:
        probe.register(name, sum(part[name] for part in owned))
    probe.register("kv_cache", engine.nbytes if engine else 0)
