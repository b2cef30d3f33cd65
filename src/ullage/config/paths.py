"""Local paths of a config, made absolute: a run can then be continued and evaluated from any folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ullage.config.tree import Config, Section

_Some = TypeVar("_Some", bound=Section)

PATHS = (
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.model.lora_adapter_path",
    "critic.model.path",
    "reward_model.model.path",
    "reward_model.model.tokenizer_path",
)
"""Keys that name a file or folder, a Hub id or data that is made up."""
PARTS = (
    "algorithm.name",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "environment.name",
)
"""Keys that name a part of ours, or a Python file."""


def anchored(config: Config, folder: Path) -> Config:
    """The config with each path that exists below `folder` written out in full; Hub ids and names stay as they are."""

    def full(path: str) -> str:
        return str((folder / path).absolute()) if path and (folder / path).exists() else path

    def full_part(name: str) -> str:  # a bare name is never a file, even where a folder is called so
        return full(name) if name.endswith(".py") else name

    for key in PATHS:
        config = _changed(config, key, full)
    for key in PARTS:
        config = _changed(config, key, full_part)
    functions = [f.model_copy(update={"path": full(f.path) if f.path else None}) for f in config.reward.functions]
    return config.model_copy(update={"reward": config.reward.model_copy(update={"functions": functions})})


def _changed(section: _Some, key: str, change: Callable[[str], str]) -> _Some:
    """The section with the text, or each text of the list, at a dotted key changed; null stays."""
    name, _, rest = key.partition(".")
    value: Any = getattr(section, name)
    if rest:
        value = _changed(value, rest, change)
    elif isinstance(value, list):
        value = [change(item) for item in value]
    elif value is not None:
        value = change(value)
    return section.model_copy(update={name: value})
