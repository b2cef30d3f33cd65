"""Decoder layers of the Llama family for one token a sequence, with a third of the kernels and the same weights.

The linear layers are the model's own modules, adapters and quantised weights included; what lies between them is fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ullage.model.attention import Extras
from ullage.model.kernels.fused import add_norm, gate, rotate_and_store
from ullage.model.trunk import Trunk

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are these: pre-norms, rotary embeddings over whole heads, a gated MLP."""
ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")

Attend = Callable[[int, Tensor, Extras], Tensor]
"""(layer, queries [S, H, d], extras) -> [S, H, d] over what the cache holds, the new tokens included."""


class FastDecoder:
    """The layers of a trunk, from token ids to the last hidden states."""

    def __init__(self, trunk: Trunk) -> None:
        assert supports(trunk), "asked before"
        self.trunk = trunk
        self._base: Any = trunk.module.base_model

    def hidden(self, ids: Tensor, positions: Tensor, arena: Tensor, places: Tensor, attend: Attend) -> Tensor:
        """[S, D] for tokens [S] at these positions, whose keys and values go to these places of the arena."""
        if self.trunk.adapters is not None:
            self.trunk.adapters.select(self.trunk.adapter)
        base = self._base
        hidden: Tensor = base.embed_tokens(ids)
        cos, sin = (x[0] for x in base.rotary_emb(hidden[None], positions[None]))
        residual = hidden
        normed: Tensor = base.layers[0].input_layernorm(hidden)
        for number, layer in enumerate(base.layers):
            attention = layer.self_attn
            mixed = self._attend(number, attention, normed, cos, sin, arena, places, attend)
            after: Any = layer.post_attention_layernorm
            residual, normed = add_norm(mixed, residual, after.weight, after.variance_epsilon)
            mlp = layer.mlp
            out = mlp.down_proj(gate(mlp.gate_proj(normed), mlp.up_proj(normed)))
            following = base.layers[number + 1].input_layernorm if number + 1 < len(base.layers) else base.norm
            residual, normed = add_norm(out, residual, following.weight, following.variance_epsilon)
        return normed

    def _attend(
        self,
        number: int,
        attention: Any,  # noqa: ANN401 -- the attention layer of any of the family
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        arena: Tensor,
        places: Tensor,
        attend: Attend,
    ) -> Tensor:
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        query = rotate_and_store(
            attention.q_proj(normed),
            attention.k_proj(normed),
            attention.v_proj(normed),
            cos,
            sin,
            arena,
            number,
            places,
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            0.0 if query_norm is None else query_norm.variance_epsilon,
        )
        # Where layers differ, each knows its own; Mistral's are alike. A Llama takes no notice of such a number.
        knows = attention.config if attention.config.model_type == "mistral" else attention
        window = getattr(knows, "sliding_window", None) or 0
        out = attend(number, query, Extras(attention.scaling, window, None, None))
        mixed: Tensor = attention.o_proj(out.flatten(1))
        return mixed


def supports(trunk: Trunk) -> bool:
    """Whether these layers are what the trunk computes."""
    config, base = trunk.module.config.get_text_config(), trunk.module.base_model
    if config.model_type not in FAMILY or getattr(config, "hidden_act", None) not in ("silu", "swish"):
        return False
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("rope_type") in ("dynamic", "longrope") or size % 2:
        return False  # angles of some tokens, or that change with the longest sequence
    layers = trunk.layers
    return all(
        all(hasattr(layer.self_attn, name) for name in ATTENTION_PARTS)
        and all(hasattr(layer.mlp, name) for name in MLP_PARTS)
        and hasattr(layer.self_attn, "q_norm") == hasattr(layer.self_attn, "k_norm")
        and all(isinstance(getattr(layer, name, None), torch.nn.Module) for name in ("input_layernorm",))
        for layer in layers
    ) and hasattr(base, "rotary_emb")
