"""What a role outside a run can do, and a schedule for any batch."""

from __future__ import annotations

from ullage.base.communicator import Solo
from ullage.base.errors import ConfigError
from ullage.config.tree import Config, Optim
from ullage.trainer.schedule import Schedule


def require_alone(tree: Config, optim: Optim) -> None:
    """ConfigError where a role outside a run cannot do what the config asks for."""
    if not tree.actor_rollout_ref.model.path:
        raise ConfigError(
            "actor_rollout_ref.model.path: no model", "give a Hugging Face folder, a GGUF file or a Hub id"
        )
    timed = optim.lr_scheduler_type != "constant" or (optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0)
    if timed and tree.trainer.total_training_steps is None:
        raise ConfigError(
            "the learning rate follows a schedule, but nothing says how many updates there will be",
            "set trainer.total_training_steps",
        )
    correction = tree.algorithm.rollout_correction
    for key, wanted in (
        ("environment.name", tree.environment.name),
        ("reward.overlong_buffer", tree.reward.overlong_buffer),
        ("algorithm.filter_groups.enable", tree.algorithm.filter_groups.enable),
        ("algorithm.rollout_correction.rollout_is", None if correction.rollout_is == "auto" else correction.rollout_is),
        ("algorithm.rollout_correction.rollout_rs", correction.rollout_rs),
        ("algorithm.rollout_correction.bypass_mode", correction.bypass_mode),
    ):
        if wanted:
            raise ConfigError(f"{key} is given, which only a run can do", "leave it out, or use ullage.Trainer")


def schedule_for(tree: Config, num_prompts: int, aggregation: str) -> Schedule:
    """Mini-batches of a batch of any size: as the config says, and no larger than the batch."""
    actor = tree.actor_rollout_ref.actor
    mini = min(actor.ppo_mini_batch_size or num_prompts, num_prompts)
    arr = tree.actor_rollout_ref.model_copy(update={"actor": actor.model_copy(update={"ppo_mini_batch_size": mini})})
    data = tree.data.model_copy(update={"train_batch_size": num_prompts})
    return Schedule(tree.model_copy(update={"data": data, "actor_rollout_ref": arr}), aggregation, Solo())
