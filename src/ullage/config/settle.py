"""Keys that are left on `auto`, and configs in which they have become values. What does the work meets only those."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from ullage.config.tree import Config

Part = TypeVar("Part", bound=BaseModel)

AUTO = "auto"
PASS_TOKENS = 8192
"""Tokens of one pass, where sequences are no longer."""
SLOTS = 64
ACTOR_TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
NUM_SLOTS = "actor_rollout_ref.rollout.max_num_seqs"
PATHS = {
    "optimizer_state": "memory.optimizer_state",
    "gradients": "memory.gradients",
    "offload_roles": "memory.offload_roles",
    "recompute": "memory.recompute",
    "activation_offload": "memory.activation_offload",
    "activation_share": "memory.activation_share",
    "tokens": ACTOR_TOKENS,
    "slots": NUM_SLOTS,
}
"""Where each of the choices is in the config."""


class Choices(BaseModel):
    """The keys that can be left open, with values; each means what its key means."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer_state: Literal["device", "streamed", "host"]
    gradients: Literal["weights", "float32", "host"]
    offload_roles: bool
    recompute: Literal["none", "full", "matmuls"] | float
    activation_offload: Literal["none", "sync", "async"]
    activation_share: float
    tokens: int
    """Of one forward and backward pass."""
    slots: int

    @property
    def recomputed_share(self) -> float:
        """How many of the layers run again in the backward pass."""
        if isinstance(self.recompute, str):
            return 0.0 if self.recompute == "none" else 1.0
        return self.recompute


def choices_of(config: Config) -> Choices:
    """Of a config that has no key left open."""
    return Choices.model_validate({name: value_of(config, path) for name, path in PATHS.items()})


def plain(config: Config, kind: Literal["cpu", "cuda"]) -> dict[str, object]:
    """What every key that can be left open is where nobody has worked out what fits."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    return {
        "memory.optimizer_state": "device",
        "memory.gradients": "weights",
        "memory.offload_roles": False,
        "memory.recompute": "none" if kind == "cpu" else "full",
        "memory.activation_offload": "none",
        "memory.activation_share": 1.0,
        ACTOR_TOKENS: max(PASS_TOKENS, longest),
        NUM_SLOTS: SLOTS,
    }


def open_keys(config: Config) -> list[str]:
    """Those that are left open here."""
    return [path for path in PATHS.values() if value_of(config, path) == AUTO]


def settled(config: Config, values: Mapping[str, object]) -> Config:
    """The config with its open keys at these values; keys that have one keep it."""
    return reduce(lambda made, key: with_key(made, key, values[key]), open_keys(config), config)


def plainly(config: Config, kind: Literal["cpu", "cuda"]) -> Config:
    """The config with its open keys at their plain values."""
    return settled(config, plain(config, kind))


def value_of(config: Config, key: str) -> object:
    return reduce(getattr, key.split("."), config)


def with_key(section: Part, key: str, value: object) -> Part:
    """The same config with one key changed."""
    first, _, rest = key.partition(".")
    return section.model_copy(update={first: with_key(getattr(section, first), rest, value) if rest else value})
