"""The gated MLP of a decoder layer, `down(act(gate) * up)`, and who computes the product in its middle.

That product is as wide as its factors and only a few element-wise operations away from them: kept for the backward pass
it costs as much memory as either, made again next to no time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

# act_fn, gate, up -> act_fn(gate) * up
Product = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor]

# Classes of transformers whose forward is `down_proj(act_fn(gate_proj(x)) * up_proj(x))` and nothing else. Others look
# much alike, and clamp, scale or drop something.
GATED = frozenset(
    {
        "CohereMLP",
        "Cohere2MLP",
        "CwmMLP",
        "DeepseekV2MLP",
        "DeepseekV3MLP",
        "Ernie4_5MLP",
        "Exaone4MLP",
        "GemmaMLP",
        "Gemma2MLP",
        "Gemma3MLP",
        "Glm4MoeMLP",
        "GraniteMLP",
        "HeliumMLP",
        "HunYuanDenseV1MLP",
        "LlamaMLP",
        "MinistralMLP",
        "Ministral3MLP",
        "MistralMLP",
        "OlmoMLP",
        "Olmo2MLP",
        "Olmo3MLP",
        "Qwen2MLP",
        "Qwen2MoeMLP",
        "Qwen3MLP",
        "Qwen3MoeMLP",
        "SmolLM3MLP",
        "StableLmMLP",
    }
)


def plain_product(act_fn: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """As transformers writes it."""
    return act_fn(gate) * up


def gated_mlp(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The layer's MLP, where it is one of these and computes as its class says or as it was told here."""
    mlp = getattr(layer, "mlp", None)
    kind = type(mlp)
    if kind.__name__ not in GATED or kind.__module__.partition(".")[0] != "transformers":
        return None
    replaced = vars(mlp).get("forward")  # such as by Liger, whose kernel makes the product itself
    return mlp if replaced is None or getattr(replaced, "__func__", None) is _forward else None


def set_product(layer: torch.nn.Module, product: Product | None) -> bool:
    """Let `product` compute the layer's gated product in passes with gradients, or with None nobody in particular.

    The last call counts, so roles that share a module can each ask. False where the layer has no gated MLP.
    """
    mlp: Any = gated_mlp(layer)
    if mlp is None:
        return False
    if product is not None:
        # A bound method of the module itself is to a compiler the same code in all layers; an object would be another.
        mlp.gated_product, mlp.forward = product, MethodType(_forward, mlp)
    elif "forward" in vars(mlp):
        del mlp.gated_product, mlp.forward  # the class's own again
    return True


def _forward(mlp: Any, x: Tensor) -> Tensor:  # noqa: ANN401 -- one of many classes
    if not torch.is_grad_enabled():  # its own frees the gate before there is an up
        out: Tensor = type(mlp).forward(mlp, x)
        return out
    out = mlp.down_proj(mlp.gated_product(mlp.act_fn, mlp.gate_proj(x), mlp.up_proj(x)))
    return out
