"""The runs that documents speak of: models, methods, lengths and levers, each a set of keys that a prompt takes too."""

from __future__ import annotations

from functools import cache
from itertools import product

from ullage.config.settle import ACTOR_TOKENS, NUM_SLOTS
from ullage.planner.documents.worked import Settings, worked

METHODS = ("full", "LoRA", "QLoRA")
ALGORITHMS = ("grpo", "ppo")
RANK = 16
CONTEXT = 2048
ADAPTERS: dict[str, object] = {"actor_rollout_ref.model.lora_rank": RANK}
OFFLOAD = "memory.activation_offload"

SIZES = (
    ("0.14B", "SmolLM2-135M"),
    ("0.36B", "SmolLM2-360M"),
    ("0.5B", "Qwen2.5-0.5B"),
    ("1.5B", "Qwen2.5-1.5B"),
    ("3B", "Qwen2.5-3B"),
    ("7B", "Llama-2-7B"),
    ("8B", "Llama-3.1-8B"),
    ("13B", "Llama-2-13B"),
    ("32B", "Qwen2.5-32B"),
    ("70B", "Llama-3.1-70B"),
)
"""Sizes that people ask for, and a model of that size that Ullage trains."""

ONE_SEQUENCE: dict[str, object] = {
    "algorithm.name": "reinforce_plus_plus",
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": CONTEXT,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.kv_cache_tokens": 16,
}
"""What tables of fine-tuning mean by `batch 1, 2048 tokens`: one sequence, no rollout to speak of."""
FOUR_SAMPLES: dict[str, object] = {
    "algorithm.name": "grpo",
    "data.train_batch_size": 1,
    "data.max_prompt_length": 512,
    "data.max_response_length": 256,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
}
"""A small step of GRPO: a prompt, four samples, one of them in a pass."""
SPARE: dict[str, object] = {
    "memory.recompute": "full",
    "memory.optimizer_state": "streamed",
    "memory.gradients": "host",
    "memory.offload_roles": True,
    ACTOR_TOKENS: CONTEXT,
    NUM_SLOTS: 8,
}
"""Every lever that leaves what is learned alone; activations on the host are tried beside it."""


def base(method: str, algorithm: str, context: int = CONTEXT) -> dict[str, object]:
    """Ullage's defaults with a method, an algorithm and a length: one part prompt, three parts response."""
    settings: dict[str, object] = {
        "algorithm.name": algorithm,
        "data.max_prompt_length": context // 4,
        "data.max_response_length": context - context // 4,
    }
    if method != "full":
        settings |= ADAPTERS
        if algorithm == "ppo":
            settings["critic.model.lora_rank"] = RANK
    if method == "QLoRA":
        settings["actor_rollout_ref.model.quantization"] = "nf4"
    return settings


def roomy(model: str, method: str, algorithm: str) -> Settings:
    """Everything on the device, layers recomputed, 64 sequences decoded at once: what a run is where room abounds."""
    del model
    return base(method, algorithm)


@cache
def spare(model: str, method: str, algorithm: str) -> Settings:
    """With every lever pulled."""
    tries = [base(method, algorithm) | SPARE | {OFFLOAD: where} for where in ("none", "async")]
    return min(tries, key=lambda settings: worked(model, settings).peak_bytes)


def kinds() -> list[tuple[str, str]]:
    return [(method, algorithm) for algorithm, method in product(ALGORITHMS, METHODS)]


def named(method: str, algorithm: str) -> str:
    return f"{algorithm.upper()}, {method}"
