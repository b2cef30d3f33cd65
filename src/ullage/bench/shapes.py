"""Models of well-known shapes with random weights, made on the device: benchmarks need no download."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ullage.base.errors import UsageError
from ullage.model.language_model import LanguageModel
from ullage.model.quantise import Quantisation
from ullage.model.random_weights import random_model
from ullage.model.target import Target

MAX_POSITIONS = 8192


def _qwen2(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, *, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": MAX_POSITIONS,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen2(64, 128, 2, 4, 2, 512, tied=True),
    "0.5B": _qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    "1.5B": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "3B": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "7B": _qwen2(3584, 18944, 28, 28, 4, 152064, tied=False),
    "14B": _qwen2(5120, 13824, 48, 40, 8, 152064, tied=False),
    "32B": _qwen2(5120, 27648, 64, 40, 8, 152064, tied=False),
    "8B": _qwen2(4096, 12288, 36, 32, 8, 151936, tied=False) | {"model_type": "qwen3", "head_dim": 128},
    "Qwen3-0.6B": _qwen2(1024, 3072, 28, 16, 8, 151936, tied=True) | {"model_type": "qwen3", "head_dim": 128},
    "Qwen3-1.7B": _qwen2(2048, 6144, 28, 16, 8, 151936, tied=True) | {"model_type": "qwen3", "head_dim": 128},
}
"""Qwen2.5's, and Qwen3's (8B and those with its name), as their config.json files give them."""


def shape_config(name: str) -> PretrainedConfig:
    """The Hugging Face config of a shape."""
    if name not in SHAPES:
        raise UsageError(f"no shape {name}", f"one of: {', '.join(SHAPES)}")
    shape = dict(SHAPES[name])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    assert isinstance(config, PretrainedConfig), "what the factory makes"
    return config


def shaped_model(name: str, target: Target, *, quantization: Quantisation | None = None) -> LanguageModel:
    """Random weights of that shape, ready for the trainer and the engine."""
    return random_model(shape_config(name), target, quantization=quantization)


def multiplied_parameters(module: PreTrainedModel) -> tuple[int, int]:
    """Parameters that every token is multiplied with, and those of the output head, which only some tokens meet."""
    config = module.config.get_text_config()
    table = config.vocab_size * config.hidden_size
    total = sum(p.numel() for p in module.parameters())
    body = total - table * (1 if config.tie_word_embeddings else 2)
    return body, table


def training_flops(module: PreTrainedModel, lengths: list[int], loss_tokens: int) -> float:
    """Forward and backward: 6 for each multiplied parameter and token, and causal attention; recomputation not counted.

    Attention: 4 s^2 h d forward for full scores and values, half of it causal, and twice that again backward.
    """
    config = module.config.get_text_config()
    body, head = multiplied_parameters(module)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_square = float(6 * config.num_hidden_layers * heads * size)
    return 6.0 * (body * sum(lengths) + head * loss_tokens) + per_square * sum(n * n for n in lengths)
