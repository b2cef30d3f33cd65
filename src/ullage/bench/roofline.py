"""The least time that generating can take on a device: bytes that must be read, and products that must be made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

LOGIT_BYTES = 8
"""A logit is written once and read once, in float32."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a device reaches in practice."""

    bandwidth: float
    """Bytes a second of copies on the device."""
    flops: float
    """A second, of large matrix products in bf16."""


H200 = Ceiling(4.29e12, 788e12)
"""As measured: a copy, and products of 8192 cubed on random data."""


def weight_numbers(config: PretrainedConfig) -> int:
    """Parameters that every token is multiplied with: layers and head, not the look-up of an embedding."""
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    queries, keys = text.num_attention_heads * size, text.num_key_value_heads * size
    layer = text.hidden_size * (2 * queries + 2 * keys + 3 * text.intermediate_size)
    return int(text.num_hidden_layers * layer + text.vocab_size * text.hidden_size)


def cache_bytes(config: PretrainedConfig, width: int = 2) -> int:
    """Of one token's keys and values."""
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * text.num_key_value_heads * size * width)


def decode_seconds(
    config: PretrainedConfig, prompts: Sequence[float], responses: Sequence[int], ceiling: Ceiling
) -> float:
    """Every sequence decoded at once, until it ends; the prompts' own pass is not counted.

    A step reads the weights once, or multiplies with them for as long as that takes; reads every running sequence's
    cache; writes and reads its logits.
    """
    numbers, each = weight_numbers(config), cache_bytes(config)
    vocabulary = config.get_text_config().vocab_size
    seconds = 0.0
    for step in range(max(responses, default=0)):
        running = [prompt + step for prompt, length in zip(prompts, responses, strict=True) if length > step]
        rows = len(running)
        seconds += max(2 * numbers / ceiling.bandwidth, 2 * numbers * rows / ceiling.flops)
        seconds += (sum(running) * each + LOGIT_BYTES * rows * vocabulary) / ceiling.bandwidth
    return seconds


def prefill_seconds(config: PretrainedConfig, prompts: Sequence[int], ceiling: Ceiling) -> float:
    """The prompts' own pass: products alone. The head is met once by each."""
    head = config.get_text_config().vocab_size * config.get_text_config().hidden_size
    return 2.0 * (weight_numbers(config) - int(head)) * sum(prompts) / ceiling.flops
