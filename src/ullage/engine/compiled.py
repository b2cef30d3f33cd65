"""Decoder blocks compiled one by one: their element-wise operations fuse, and one compilation serves all blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ullage.engine.gated import plain_product, set_product


def compile_layers(layers: Sequence[torch.nn.Module]) -> None:
    """Training passes run compiled code; passes without gradients, such as decoding, run as they are.

    The compiler keeps what matrix products read, so also the product in a gated MLP, although it can be made again from
    its factors, which are kept too. Here it is told to make it again.
    """
    for layer in layers:
        set_product(layer, _product_made_again)
        layer.forward = _compiled(layer.forward)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    fast = torch.compile(forward, dynamic=True)  # packed rows differ in length

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return fast(*args, **kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)

    return run


def _product_made_again(act_fn: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    """To the compiler a checkpoint is no call: it marks operations that the backward pass has to repeat."""
    made: Tensor = checkpoint(partial(plain_product, act_fn), gate, up, use_reentrant=False, preserve_rng_state=False)
    return made
