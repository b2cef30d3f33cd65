"""Random configs for the memory benchmark: drawn by a seed, kept where the closed form says that a device can run them.

Which model and which method a config has goes round, so that every size is there with every method; all else is chance.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ullage.base.errors import UsageError
from ullage.bench.shapes import MAX_POSITIONS, SHAPES
from ullage.config.load import load_mapping
from ullage.config.tree import Config
from ullage.planner.components import CONTEXT
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": MAX_POSITIONS, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    **SHAPES,
    "Llama 1B": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Llama 8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""The content of a config.json, by the name of a shape: the others' beside Llama 3.2's and 3.1's."""
HELD_OUT = "llama"
"""The model type whose rows no constant of the closed forms was fitted to."""
DRAWN = ("0.5B", "Llama 8B", "3B", "7B", "1.5B", "14B", "Llama 1B", "8B")
SMALL = ("tiny",)
METHODS = ("full", "LoRA", "full", "nf4", "full", "LoRA", "int8")
"""As many as to have no divisor in common with the number of models."""

DEVICE_SHARE = 0.9
"""Of the device, above which a config is drawn again."""
HOST_LIMIT = 60 << 30
SECONDS_LIMIT = 8.0
TRIES = 100
BUDGETS = (2048, 3072, 4096, 6144, 8192, 12288, 16384)
BUDGETS_SMALL = (256, 384)
"""Tokens of a pass."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_LORA, _BITS = "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.quantization"
_CRITIC_RANK = "critic.model.lora_rank"
Settings = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    """A config of the benchmark: a model, and keys beside the defaults."""

    number: int
    model: str
    settings: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """What it is, whatever its number."""
        text = json.dumps([self.model, MODELS[self.model], dict(self.settings)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def config(self) -> Config:
        return load_mapping(self.settings).config

    @cached_property
    def layout(self) -> Layout:
        return Layout(Shape.from_config(MODELS[self.model], self.model), self.config)

    @property
    def method(self) -> str:
        return str(self.settings.get(_BITS) or ("LoRA" if _LORA in self.settings else "full"))

    @property
    def text(self) -> str:
        """For people: the model, the method and the memory levers."""
        told = {key.rpartition(".")[2]: value for key, value in self.settings.items() if key.startswith("memory.")}
        levers = ", ".join(f"{name}={value}" for name, value in told.items() if name != "replay")
        return f"{self.model} {self.method} {self.settings['algorithm.name']}: {levers}"


def draws(count: int, seed: int, memory_bytes: int, *, small: bool = False) -> list[Draw]:
    """So many configs that fit; the same for the same numbers, on every machine."""
    models = SMALL if small else DRAWN
    found: list[Draw] = []
    keys: set[str] = set()
    for number in range(count):
        draw = _draw(number, models[number % len(models)], METHODS[number % len(METHODS)], seed, memory_bytes, keys)
        keys.add(draw.key)
        found.append(draw)
    return found


def _draw(number: int, model: str, method: str, seed: int, memory_bytes: int, taken: set[str]) -> Draw:
    chance = random.Random(f"{seed}:{number}")
    budgets = BUDGETS_SMALL if model in SMALL else BUDGETS
    # Large budgets are drawn as often as small ones; where nothing fits with one, the next smaller is tried.
    for tokens in reversed(budgets[: chance.randrange(len(budgets)) + 1]):
        for _ in range(TRIES):
            settings = _work(chance, tokens) | _method(chance, method) | _levers(chance, method)
            draw = Draw(number, model, settings)
            if draw.key not in taken and fits(draw, memory_bytes):
                return draw
    raise UsageError(
        f"no config of {model}, {method}, fits {memory_bytes / 2**30:.0f} GiB", "take a larger GPU or another seed"
    )


def fits(draw: Draw, memory_bytes: int) -> bool:
    """By closed form: the time of one step, the host, and the device."""
    if sum(seconds(draw).values()) > SECONDS_LIMIT or step_host_bytes(draw.layout) > HOST_LIMIT:
        return False
    return max(phase.allocated_bytes for phase in draw.layout.phases()) + CONTEXT <= DEVICE_SHARE * memory_bytes


BUFFERS = ("optimizer", "gradients", "activations", "roles")
"""What a step holds in host memory."""


def step_host_bytes(layout: Layout) -> int:
    """Host memory of the process in a step: nothing is read from files, written or scored there."""
    held = layout.host()
    return held["process"] + sum(held[name] for name in BUFFERS)


# --- chance ---


def _work(chance: random.Random, tokens: int) -> Settings:
    """Lengths, and as many prompts as make two passes or three, so that gradients are there before the last."""
    small = tokens in BUDGETS_SMALL
    prompt = tokens // chance.choice((4, 8, 16))
    response = chance.choice((8, 16) if small else (16, 24, 32, 48, 64))
    n = chance.choice((2, 4, 8))
    prompts = max(2, round(chance.uniform(1.3, 2.0) * tokens / (prompt + n * (response - 1))))
    slots = chance.choice((4, 8) if small else (16, 32, 64, 128, 256))
    settings: Settings = {
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt,
        "data.max_response_length": response,
        _ROLLOUT + "n": n,
        _ROLLOUT + "max_num_seqs": slots,
        _ACTOR + "ppo_max_token_len_per_gpu": tokens,
    }
    if chance.random() < 0.3:  # an arena that not all slots fill at once
        settings[_ROLLOUT + "kv_cache_tokens"] = max(1, slots // 2) * -(-(prompt + response) // 16) * 16
    return settings


def _method(chance: random.Random, method: str) -> Settings:
    """The algorithm and its roles."""
    algorithm = chance.choice(("grpo", "ppo"))
    settings: Settings = {"algorithm.name": algorithm, "memory.replay": False}
    rank = 0
    if method != "full":
        rank = settings[_LORA] = chance.choice((8, 16, 32, 64))
    if method in ("nf4", "int8"):
        settings[_BITS] = method
    if chance.random() < 0.3:
        settings[_ACTOR + "use_kl_loss"] = True
    if algorithm == "ppo":
        critic = chance.choice(("shared", "adapters", "own"))
        if critic == "shared":
            settings["critic.share_actor"] = True
        elif critic == "adapters":
            settings[_CRITIC_RANK] = rank or 16
    return settings


def _levers(chance: random.Random, method: str) -> Settings:
    """Every memory lever by itself, but for the few pairs that a run refuses."""
    state = chance.choice(("device", "streamed", "host"))
    on_host = state == "host"
    settings: Settings = {
        _ACTOR + "optim.optimizer": chance.choice(("adamw", "sgd") if on_host else ("adamw", "adamw_8bit", "sgd")),
        "critic.optim.optimizer": "adamw" if on_host else chance.choice(("adamw", "adamw_8bit")),
        "memory.rounding": "master" if on_host else chance.choice(("master", "stochastic")),
        "memory.optimizer_state": state,
        "memory.gradients": chance.choice(("weights", "float32", "host")),
        "memory.recompute": chance.choice(("none", "full", "full", "matmuls", round(chance.uniform(0.2, 0.8), 2))),
        "memory.activation_offload": chance.choice(("none", "none", "sync", "async")),
        "memory.activation_share": chance.choice((1.0, round(chance.uniform(0.2, 0.8), 2))),
        "memory.offload_roles": chance.choice((False, True)),
    }
    if method != "full" and chance.random() < 0.3:  # many leave these alone with adapters
        settings["memory.optimizer_state"], settings["memory.gradients"] = "device", "weights"
    return settings


# --- time, so that a draw costs seconds ---

_MATMUL = 250e12
"""FLOP/s of passes on an H200, small micro-batches included."""
_DECODE_LAYER = 1.4e-3
"""Seconds of one layer in one decoding step, whatever the slots: 48 ms for 36 layers, 66 for 48 (update_h200_fit)."""
_REGISTERED = 6.5e9
"""Bytes a second at which host memory becomes pinned: 62 GiB in 10 s (update_h200_fit)."""
_STEP_SECONDS = {"device": 0.03e-9, "streamed": 0.4e-9, "host": 0.65e-9}
"""Of the optimizer, for a parameter (update_h200_state)."""
_START = 1.2
"""Making the objects of a row and taking them apart."""


def seconds(draw: Draw) -> dict[str, float]:
    """What one row takes on an H200, roughly: enough to leave long ones out, and to say how long a bench lasts."""
    layout, config = draw.layout, draw.config
    rollout, n = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.n
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    samples = config.data.train_batch_size * n
    arena = None if rollout.kv_cache_tokens == "auto" else rollout.kv_cache_tokens // (prompt + response)
    slots = max(1, min(layout.slots, arena or layout.slots))
    trained = [layout.actor, *([layout.critic] if layout.critic else [])]
    passes = 1 + len(trained) * (3 + (layout.recomputed > 0)) + (layout.critic is not None) + bool(layout.reference)
    tokens = config.data.train_batch_size * (prompt + n * response)
    kind = 1.4 if layout.actor.rank else 1.0
    if layout.quantisation:
        kind *= 2
    return {
        "start": _START + step_host_bytes(layout) / _REGISTERED,
        "rollout": -(-samples // slots) * response * layout.shape.layers * _DECODE_LAYER * kind,
        "passes": 2 * passes * layout.shape.parameters * tokens / _MATMUL,
        "optimizer": sum(role.parameters for role in trained) * _STEP_SECONDS[layout.chosen.optimizer_state],
    }


def capped_first(found: Sequence[Draw], seed: int, count: int) -> list[Draw]:
    """Those that the cap tests take, by chance of their own."""
    return sorted(found, key=lambda draw: hashlib.sha256(f"{seed}:{draw.key}".encode()).digest())[:count]
