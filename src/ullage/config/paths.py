"""Local paths of a config, made absolute: a run can then be continued and evaluated from any folder."""

from pathlib import Path

from ullage.config.tree import Config


def anchored(config: Config, folder: Path) -> Config:
    """The config with each path that exists below `folder` written out in full; Hub ids and names stay as they are."""

    def full(path: str) -> str:
        return str((folder / path).absolute()) if path and (folder / path).exists() else path

    arr, model = config.actor_rollout_ref, config.actor_rollout_ref.model
    tokenizer = full(model.tokenizer_path) if model.tokenizer_path else None
    model = model.model_copy(update={"path": full(model.path), "tokenizer_path": tokenizer})
    critic_model = config.critic.model
    if critic_model.path:
        critic_model = critic_model.model_copy(update={"path": full(critic_model.path)})
    loss = arr.actor.policy_loss
    loss = loss.model_copy(update={"loss_mode": _full_part(loss.loss_mode, folder)})
    actor = arr.actor.model_copy(update={"policy_loss": loss})
    algorithm = {name: _full_part(getattr(config.algorithm, name), folder) for name in ("name", "adv_estimator")}
    functions = [f.model_copy(update={"path": full(f.path) if f.path else None}) for f in config.reward.functions]
    return config.model_copy(
        update={
            "data": config.data.model_copy(
                update={
                    "train_files": [full(file) for file in config.data.train_files],
                    "val_files": [full(file) for file in config.data.val_files],
                }
            ),
            "actor_rollout_ref": arr.model_copy(update={"model": model, "actor": actor}),
            "critic": config.critic.model_copy(update={"model": critic_model}),
            "reward": config.reward.model_copy(update={"functions": functions}),
            "algorithm": config.algorithm.model_copy(update=algorithm),
        }
    )


def _full_part(name: str | None, folder: Path) -> str | None:
    """A part of an algorithm given as a file; a bare name is never one, even where a folder is called so."""
    return str((folder / name).absolute()) if name and name.endswith(".py") and (folder / name).exists() else name
