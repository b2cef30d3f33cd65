"""Decoder blocks compiled one by one: their element-wise operations fuse, and one compilation serves all blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch


def compile_layers(layers: Sequence[torch.nn.Module]) -> None:
    """Training passes run compiled code; passes without gradients, such as decoding, run as they are."""
    for layer in layers:
        layer.forward = _compiled(layer.forward)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    fast = torch.compile(forward, dynamic=True)  # packed rows differ in length

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return fast(*args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    return run
