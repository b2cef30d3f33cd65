"""What may change between a run and its continuation, and what its state depends on."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

from ullage.base.errors import ConfigError
from ullage.config.keys import fields_by_path
from ullage.config.tree import Config

BOUND = frozenset(
    {
        # The weights and the optimizer's tensors.
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.dtype",
        "critic.enable",
        "critic.model.path",
        "critic.share_actor",
        "actor_rollout_ref.model.lora_rank",
        "actor_rollout_ref.model.lora_alpha",
        "actor_rollout_ref.model.target_modules",
        "actor_rollout_ref.model.lora_adapter_path",
        "actor_rollout_ref.model.quantization",
        "critic.model.lora_rank",
        "trainer.device",
        # Which prompts there are, what they look like, and their order.
        "actor_rollout_ref.model.tokenizer_path",
        "actor_rollout_ref.model.custom_chat_template",
        "data.train_files",
        "data.train_max_samples",
        "data.columns",
        "data.max_prompt_length",
        "data.overlong_prompts",
        "data.apply_chat_template",
        "data.apply_chat_template_kwargs",
        "data.system_prompt",
        "data.shuffle",
        "data.mixing_weights",
        "data.curriculum",
        "data.seed",
        "trainer.seed",
        # What the best score so far was measured on.
        "data.val_files",
        "data.val_max_samples",
        # What the run is, and where.
        "algorithm.name",
        "algorithm.adv_estimator",
        "trainer.experiment_name",
        "trainer.default_local_dir",
    }
)
"""Keys that a checkpoint cannot outlive."""


class Change(NamedTuple):
    """One key with another value than before."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path} = {self.after!r} (was {self.before!r})"


def changes(before: Config, after: Config) -> list[Change]:
    """Every key whose value differs, in the order of the tree."""
    pairs = ((path, _value(before, path), _value(after, path)) for path in fields_by_path())
    return [Change(path, old, new) for path, old, new in pairs if old != new]


def refuse_bound(changed: list[Change]) -> None:
    """ConfigError for the changes that the saved state does not allow; it names all of them."""
    refused = [str(change) for change in changed if change.path in BOUND]
    if refused:
        raise ConfigError(
            f"{len(refused)} key(s) cannot change in a run that goes on:\n  " + "\n  ".join(refused),
            "leave them out; for other values start a new run, from this run's final/ if you like",
        )


def _value(config: Config, path: str) -> object:
    return reduce(getattr, path.split("."), config)
