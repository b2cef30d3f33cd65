"""Gradient checkpointing: decoder layers forget their activations and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ullage.engine.gated import gated_mlp
from ullage.engine.offload import OffloadedForward
from ullage.engine.remake import RemadeForward
from ullage.model.lora import AdaptedLinear

Keep = Literal["nothing", "matmuls"]

# By name, as not every version and build of torch has them all. The last is what `varlen_attn` runs.
MATMULS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
    }
)


def recompute_layers(layers: Sequence[torch.nn.Module], *, share: float = 1.0, keep: Keep = "nothing") -> None:
    """Make this share of the layers, evenly spread, recompute everything, or all but matrix products and attention.

    The last call counts, so roles that share a module can each ask. Nothing random happens inside a layer (no
    dropout), so no RNG state is kept.
    """
    assert 0.0 <= share <= 1.0, f"a share of the layers, not {share}"
    count = round(share * len(layers))
    for index, layer in enumerate(layers):
        # Offload stays outermost, whichever came first: it moves the inputs that a recomputed layer keeps.
        holder = layer.forward if isinstance(layer.forward, OffloadedForward) else layer
        plain = _plain(holder.forward)
        chosen = (index + 1) * count // len(layers) > index * count // len(layers)
        holder.forward = _recomputed(plain, keep, layer) if chosen else plain


def _plain(forward: Callable[..., Any]) -> Callable[..., Any]:
    if isinstance(forward, RemadeForward):
        return forward.undo()
    return forward.plain if isinstance(forward, _RecomputedForward) else forward


def _recomputed(plain: Callable[..., Any], keep: Keep, layer: torch.nn.Module) -> Callable[..., Any]:
    """Which operators a layer has is known of common ones only; in others each operator is asked for as it runs."""
    if keep == "matmuls" and gated_mlp(layer) is not None:
        return RemadeForward(plain, layer)
    return _RecomputedForward(plain, keep, layer)


class _RecomputedForward:
    """A layer's forward that keeps its inputs, and what `keep` names, instead of its activations."""

    def __init__(self, plain: Callable[..., Any], keep: Keep, layer: torch.nn.Module) -> None:
        update_wrapper(self, plain, updated=())
        self.plain = plain
        self.layer = layer
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if keep == "matmuls":
            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matmuls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        return checkpoint(self._with_adapter(), *args, **self.options, **kwargs)

    def _with_adapter(self) -> Callable[..., Any]:
        """The forward with the adapter of now: until the backward pass another role may have selected its own."""
        in_use = next((part.in_use for part in self.layer.modules() if isinstance(part, AdaptedLinear)), None)
        if in_use is None:
            return self.plain
        name = in_use.name

        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            in_use.name = name
            return self.plain(*args, **kwargs)

        return run


def _keep_matmuls(
    context: object, operator: torch._ops.OpOverload, *args: object, **kwargs: object
) -> CheckpointPolicy:
    del context, args, kwargs
    kept = operator.name() in MATMULS  # one that writes into a given tensor has another name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
