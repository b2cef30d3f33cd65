"""Asks a freshly loaded model how it attends, before anything relies on it: one forward pass over two tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ullage.base.errors import ModelError
from ullage.model.attention import Extras

REMEDY = "choose a decoder-only model whose layers use transformers' attention interface, such as Llama or Qwen"


class CacheShape(NamedTuple):
    """What one token leaves in the KV cache."""

    layers: int
    heads: int
    head_size: int


class _Probe:
    """A layout that only takes notes."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.shapes: set[tuple[int, int, int]] = set()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        del extras
        self.layers.append(layer)
        self.shapes.add((key.shape[0], key.shape[2], value.shape[2]))
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


def cache_shape(module: PreTrainedModel) -> CacheShape:
    """The model's cache shape; `ModelError` unless every layer attends once, through us, with one shape.

    Layers that mix tokens in any other way (an attention of their own, a recurrence, a second call) would run without
    a complaint and leak from one packed sequence into the next, or read a cache that was overwritten.
    """
    name = type(module).__name__
    probe = _Probe()
    ids = torch.zeros(1, 2, dtype=torch.long, device=module.device)
    positions = torch.arange(2, device=module.device)[None]
    try:
        with torch.no_grad():
            module.base_model(input_ids=ids, position_ids=positions, use_cache=False, layout=probe)
    except ModelError:
        raise
    except Exception as error:  # an architecture that does not know the interface may raise anything
        raise ModelError(f"{name} cannot run with packed attention: {error}", REMEDY) from error
    expected = list(range(module.config.get_text_config().num_hidden_layers))
    if probe.layers != expected:
        raise ModelError(
            f"{name} attends in layers {probe.layers} instead of once in each of its {len(expected)}", REMEDY
        )
    if len(probe.shapes) > 1 or any(key_size != value_size for _, key_size, value_size in probe.shapes):
        raise ModelError(f"{name} has keys and values of several shapes: {sorted(probe.shapes)}", REMEDY)
    ((heads, head_size, _),) = probe.shapes
    return CacheShape(len(expected), heads, head_size)
