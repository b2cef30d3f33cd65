"""Flat config classes, as verl's and StateSet's users write them. Each says what keys of the tree its fields are.

A field of theirs that has no counterpart goes to the tree under verl's name, whose rules then hold: without effect
(said once), or of a later release (the config loads, the run does not start).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from ullage.base.errors import ConfigError
from ullage.config.load import load_mapping
from ullage.config.tree import Config

_MODEL = "actor_rollout_ref.model."
_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."

FLAT_NAMES = {
    "model_path": _MODEL + "path",
    "model_dtype": _MODEL + "dtype",
    "total_epochs": "trainer.total_epochs",
    "train_batch_size": "data.train_batch_size",
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
    "learning_rate": _ACTOR + "optim.lr",
    "ppo_epochs": _ACTOR + "ppo_epochs",
    "ppo_mini_batch_size": _ACTOR + "ppo_mini_batch_size",
    "clip_epsilon": _ACTOR + "clip_ratio",
    "kl_coef": _ACTOR + "kl_loss_coef",
    "n": _ROLLOUT + "n",
    "temperature": _ROLLOUT + "temperature",
}
"""Where the tree has what user code reads as `self.config.clip_epsilon`."""


class FlatConfig(ABC):
    """A few fields that stand for keys of the tree."""

    @abstractmethod
    def overrides(self) -> dict[str, Any]:
        """The fields as keys of the tree, `a.b.c: value`."""

    def to_config(self, *others: FlatConfig, **sections: Any) -> Config:  # noqa: ANN401 -- sections of the tree
        """The whole config: these fields, those of other flat configs, and what has no flat name, such as
        `data={"train_files": [...]}` and `reward="gsm8k"`. A key given twice is refused."""
        return load_mapping(merged(self, *others, **sections)).config


def merged(*parts: FlatConfig, **sections: Any) -> dict[str, Any]:  # noqa: ANN401 -- sections of the tree
    """Several flat configs and sections as one mapping for the loader."""
    mapping: dict[str, Any] = dict(sections)
    for part in parts:
        for key, value in part.overrides().items():
            if key in mapping and mapping[key] != value:
                raise ConfigError(f"{key} is given twice: {mapping[key]} and {value}", "keep one of the two")
            mapping[key] = value
    return mapping


@dataclass
class TrainingConfig(FlatConfig):
    """The training side of a run. verl's fields come first, in its order; StateSet's follow, None where not given."""

    model_path: str = ""
    model_dtype: str = "bfloat16"
    """bfloat16 means what `auto` does: bfloat16 weights with a float32 master on a GPU, float32 on a CPU."""
    total_epochs: int = 1
    train_batch_size: int = 1024
    """Prompts per step; replaced by the three counts below where per_device_train_batch_size is given."""
    learning_rate: float = 1e-6
    ppo_epochs: int = 1
    ppo_mini_batch_size: int = 256
    """Prompts per optimizer step; all of a step's where that is fewer."""
    clip_epsilon: float = 0.2
    kl_coef: float = 0.001
    """Weight of the KL term in the loss; 0 leaves it, and the reference model, out."""
    enable_gradient_checkpointing: bool = True
    enable_activation_offload: bool = True
    fsdp_config: dict[str, Any] = field(default_factory=dict)
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    per_device_train_batch_size: int | None = None
    """Sequences of one pass; and prompts of a step, times gradient_accumulation_steps and data_parallel_size."""
    gradient_accumulation_steps: int = 1
    num_generations: int | None = None
    max_completion_length: int | None = None
    use_lora: bool = False
    lora_r: int = 16
    lora_alpha: float = 32
    lora_dropout: float = 0.0
    gradient_checkpointing: bool | None = None
    """StateSet's name for enable_gradient_checkpointing; wins where it is given."""
    bf16: bool = False
    fp16: bool = False

    def overrides(self) -> dict[str, Any]:
        keys: dict[str, Any] = {
            _MODEL + "path": self.model_path,
            _MODEL + "dtype": self._dtype(),
            _MODEL + "enable_gradient_checkpointing": self._recomputes(),
            _MODEL + "enable_activation_offload": self.enable_activation_offload,
            _ACTOR + "optim.lr": self.learning_rate,
            _ACTOR + "ppo_epochs": self.ppo_epochs,
            _ACTOR + "ppo_mini_batch_size": min(self.ppo_mini_batch_size, self.prompts_per_step),
            _ACTOR + "clip_ratio": self.clip_epsilon,
            _ACTOR + "use_kl_loss": self.kl_coef > 0,
            _ACTOR + "kl_loss_coef": self.kl_coef,
            "data.train_batch_size": self.prompts_per_step,
            "trainer.total_epochs": self.total_epochs,
            "trainer.n_gpus_per_node": self.data_parallel_size,
        }
        given = {
            _ACTOR + "ppo_micro_batch_size_per_gpu": self.per_device_train_batch_size,
            _ROLLOUT + "n": self.num_generations,
            "data.max_response_length": self.max_completion_length,
            _ROLLOUT + "tensor_model_parallel_size": None
            if self.tensor_parallel_size == 1
            else self.tensor_parallel_size,
        }
        keys |= {key: value for key, value in given.items() if value is not None}
        keys |= {f"{_ACTOR}fsdp_config.{name}": value for name, value in self.fsdp_config.items()}
        return keys | (self._adapters() if self.use_lora else {})

    @property
    def prompts_per_step(self) -> int:
        if self.per_device_train_batch_size is None:
            return self.train_batch_size
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.data_parallel_size

    def _recomputes(self) -> bool:
        return (
            self.enable_gradient_checkpointing if self.gradient_checkpointing is None else self.gradient_checkpointing
        )

    def _dtype(self) -> str:
        if self.fp16 and not self.bf16:
            raise ConfigError(
                "fp16 = true: float16 needs loss scaling, which is not here, and would train differently",
                "use bf16=True",
            )
        return "auto" if self.bf16 or self.model_dtype in ("bfloat16", "bf16") else self.model_dtype

    def _adapters(self) -> dict[str, Any]:
        keys: dict[str, Any] = {_MODEL + "lora_rank": self.lora_r, _MODEL + "lora_alpha": self.lora_alpha}
        return keys | ({_MODEL + "lora.dropout": self.lora_dropout} if self.lora_dropout else {})


@dataclass
class GSPOConfig(TrainingConfig):
    """The same, with GSPO (arXiv:2507.18071) as the algorithm."""

    def overrides(self) -> dict[str, Any]:
        return super().overrides() | {"algorithm.name": "gspo"}


@dataclass
class RolloutConfig(FlatConfig):
    """The sampling side of a run, with verl's defaults."""

    name: str = "vllm"
    tensor_model_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 128
    n: int = 1
    temperature: float = 0.7
    top_p: float = 0.9
    enable_chunked_prefill: bool = True
    cudagraph_capture_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8])

    def overrides(self) -> dict[str, Any]:
        return {_ROLLOUT + name: value for name, value in vars(self).items()}


@dataclass
class AgentConfig(FlatConfig):
    """How a model is held in memory, by StateSet's names."""

    use_8bit: bool = False
    """Frozen weights below adapters in 8 bits, or 4: with `TrainingConfig(use_lora=True)`."""
    use_4bit: bool = False
    attn_implementation: str | None = None
    """Without effect: kernels are chosen for the device."""

    def overrides(self) -> dict[str, Any]:
        if self.use_8bit and self.use_4bit:
            raise ConfigError("use_8bit = true, use_4bit = true: a weight is kept in one of the two", "leave one out")
        given = {
            _MODEL + "quantization": "nf4" if self.use_4bit else "int8" if self.use_8bit else None,
            _MODEL + "override_config.attn_implementation": self.attn_implementation,
        }
        return {key: value for key, value in given.items() if value is not None}
