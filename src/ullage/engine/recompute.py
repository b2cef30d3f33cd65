"""Gradient checkpointing: decoder layers forget their activations and run again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def recompute_layers(layers: Sequence[torch.nn.Module]) -> None:
    """Make these layers recompute. Nothing random happens inside (no dropout), so no RNG state is kept."""
    for layer in layers:
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
