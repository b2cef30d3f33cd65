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
    functions = [f.model_copy(update={"path": full(f.path) if f.path else None}) for f in config.reward.functions]
    return config.model_copy(
        update={
            "data": config.data.model_copy(
                update={
                    "train_files": [full(file) for file in config.data.train_files],
                    "val_files": [full(file) for file in config.data.val_files],
                }
            ),
            "actor_rollout_ref": arr.model_copy(update={"model": model}),
            "reward": config.reward.model_copy(update={"functions": functions}),
            "algorithm": config.algorithm.model_copy(update={"name": full(config.algorithm.name)}),
        }
    )
