"""Ullage: reinforcement-learning post-training for language models that knows what fits.

The names below are loaded when they are first used, so that `import ullage` stays light (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.compat.custom import BaseAlgorithm, BaseTrainer
    from ullage.compat.experience import ExperienceBatch
    from ullage.compat.flat_config import AgentConfig, GSPOConfig, RolloutConfig, TrainingConfig
    from ullage.compat.policy import ActorRolloutRef
    from ullage.compat.reward import RewardModel
    from ullage.compat.trainer import Trainer, main
    from ullage.compat.value import Critic

__version__ = "0.1.0"

_HOMES = {
    "ActorRolloutRef": "policy",
    "AgentConfig": "flat_config",
    "BaseAlgorithm": "custom",
    "BaseTrainer": "custom",
    "Critic": "value",
    "ExperienceBatch": "experience",
    "GSPOConfig": "flat_config",
    "RewardModel": "reward",
    "RolloutConfig": "flat_config",
    "Trainer": "trainer",
    "TrainingConfig": "flat_config",
    "main": "trainer",
}
"""The file of ullage/compat that holds each name."""

__all__ = [
    "ActorRolloutRef",
    "AgentConfig",
    "BaseAlgorithm",
    "BaseTrainer",
    "Critic",
    "ExperienceBatch",
    "GSPOConfig",
    "RewardModel",
    "RolloutConfig",
    "Trainer",
    "TrainingConfig",
    "__version__",
    "main",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- classes and a function
    if name not in _HOMES:
        raise AttributeError(f"module 'ullage' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"ullage.compat.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
