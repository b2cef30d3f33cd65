"""Decoder layers of the Llama family with a third of the kernels and the same weights.

The weights are the model's own, adapters and quantised ones included. Layers of one input are one product where their
weights lie side by side, a product of few rows is computed in parts, and what lies between products is fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ullage.model.attention import Extras
from ullage.model.kernels.fused import Turn, add_norm, gate, norm, rotations
from ullage.model.kernels.parts import parts_of, product_in_parts
from ullage.model.lora import add_change_, drawn_product
from ullage.model.side_by_side import joint
from ullage.model.trunk import Trunk

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are these: pre-norms, rotary embeddings over whole heads, a gated MLP."""
ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")

Attend = Callable[[int, Tensor, Tensor, Tensor, Turn, Extras], Tensor]
"""(layer, projections to queries, keys and values [S, heads * d], what turns them, extras) -> [S, H, d]. Keys and
values are stored on the way."""


class FastDecoder:
    """The layers of a trunk, from token ids to the last hidden states."""

    def __init__(self, trunk: Trunk) -> None:
        assert supports(trunk), "asked before"
        self.trunk = trunk
        self._base: Any = trunk.module.base_model

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, last: Tensor | None = None) -> Tensor:
        """[S, D] for tokens [S] at these positions.

        With `last`, only these rows are wanted: the last layer computes no others behind its attention.
        """
        if self.trunk.adapters is not None:
            self.trunk.adapters.select(self.trunk.adapter)
        base = self._base
        residual: Tensor = base.embed_tokens(ids)
        rotary = base.rotary_emb
        cos, sin = rotations(positions, rotary.inv_freq.float(), rotary.attention_scaling, residual.dtype)
        first = base.layers[0].input_layernorm
        normed = norm(residual, first.weight, first.variance_epsilon)
        followers = [layer.input_layernorm for layer in base.layers[1:]] + [base.norm]
        for number, (layer, following) in enumerate(zip(base.layers, followers, strict=True)):
            mixed = _attended(number, layer.self_attn, normed, cos, sin, attend)
            if last is not None and following is base.norm:
                mixed, residual = mixed.index_select(0, last), residual.index_select(0, last)
            after, mlp = layer.post_attention_layernorm, layer.mlp
            mixed = _product(mixed, layer.self_attn.o_proj)
            residual, normed = add_norm(mixed, residual, after.weight, after.variance_epsilon)
            out = _product(gate(*_products(normed, (mlp.gate_proj, mlp.up_proj))), mlp.down_proj)
            residual, normed = add_norm(out, residual, following.weight, following.variance_epsilon)
        return normed


def _attended(
    number: int,
    attention: Any,  # noqa: ANN401 -- any of the family
    normed: Tensor,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
) -> Tensor:
    """[S, H * d]"""
    query, key, value = _products(normed, (attention.q_proj, attention.k_proj, attention.v_proj))
    turn = Turn(cos, sin, None, None, 0.0)
    if hasattr(attention, "q_norm"):
        norms = attention.q_norm, attention.k_norm
        turn = Turn(cos, sin, norms[0].weight, norms[1].weight, norms[0].variance_epsilon)
    # Where layers differ, each knows its own; Mistral's are alike. A Llama takes no notice of such a number.
    knows = attention.config if attention.config.model_type == "mistral" else attention
    extras = Extras(attention.scaling, getattr(knows, "sliding_window", None) or 0, None, None)
    return attend(number, query, key, value, turn, extras).flatten(1)


def _products(x: Tensor, layers: tuple[Any, ...]) -> Iterable[Tensor]:
    """What linear layers make of one input; columns of one tensor where that is one product."""
    together = joint(layers)
    if together is None:
        return [drawn_product(x, layer) for layer in layers]
    product = functional.linear(x, *together).split([layer.out_features for layer in layers], dim=1)
    return [add_change_(part, x, layer) for part, layer in zip(product, layers, strict=True)]


def _product(x: Tensor, layer: Any) -> Tensor:  # noqa: ANN401 -- any linear layer
    """[S, D], or in parts that `add_norm` adds up."""
    parts = parts_of(x, layer)
    return drawn_product(x, layer) if parts == 1 else product_in_parts(x, layer.weight, parts)


def siblings(module: PreTrainedModel) -> Iterator[tuple[Any, ...]]:
    """The linear layers that have one input, of a model of the family."""
    base: Any = module.base_model
    for layer in base.layers if module.config.get_text_config().model_type in FAMILY else ():
        yield tuple(getattr(layer.self_attn, name) for name in ATTENTION_PARTS[:3])
        yield tuple(getattr(layer.mlp, name) for name in MLP_PARTS[:2])


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
        and isinstance(getattr(layer, "input_layernorm", None), torch.nn.Module)
        for layer in layers
    ) and hasattr(base, "rotary_emb")
