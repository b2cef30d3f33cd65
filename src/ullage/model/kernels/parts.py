"""A matrix product as parts whose sum it is, for passes of few rows, which alone leave most of a GPU idle.

A multiprocessor computes a tile of a product, and those of a decode step have fewer tiles than a large GPU has
multiprocessors. Each part, over a stretch of the inner dimension, brings as many tiles again; `add_norm` adds them up
on its way. Shapes: P parts, S tokens, K inner, D outer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ullage.model.kernels.operator import operator

MOST = 4
LEAST_STRETCH = 1024
"""Of the inner dimension; less than that is read faster than its sums are added up."""
TILE = 128
TILES = 128
"""About as many as a large GPU has multiprocessors."""
ALIGNED = 8
"""Elements of 16 bytes, at which a row of a part has to begin."""


def parts_of(x: Tensor, layer: nn.Module) -> int:
    """In how many parts a layer's product with [S, K] is faster; 1: as it is, or no plain product at all."""
    if x.device.type == "cpu" or type(layer) is not nn.Linear or layer.bias is not None:
        return 1
    tiles = -(-len(x) // TILE) * -(-layer.out_features // TILE)
    parts = min(MOST, TILES // tiles, layer.in_features // LEAST_STRETCH)
    plain = type(layer.weight) is nn.Parameter and layer.in_features % (MOST * ALIGNED) == 0
    return (4 if parts >= 4 else 2) if parts >= 2 and plain else 1


@operator("ullage::product_in_parts")
def product_in_parts(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """[P, S, D] in float32, of [S, K] and [D, K]."""
    rows = x.unflatten(1, (parts, -1)).transpose(0, 1)  # [P, S, K / P]
    columns = weight.unflatten(1, (parts, -1)).permute(1, 2, 0)  # [P, K / P, D]
    if x.is_cuda and x.dtype != torch.float32:
        return torch.bmm(rows, columns, out_dtype=torch.float32)
    return torch.bmm(rows.float(), columns.float())


@product_in_parts.register_fake
def _(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    return x.new_empty(parts, len(x), len(weight), dtype=torch.float32)
