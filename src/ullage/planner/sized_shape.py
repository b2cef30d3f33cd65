"""A model of which only the size is known: a dense shape between two models of well-known proportions."""

from __future__ import annotations

import math
from dataclasses import replace

from ullage.base.errors import ModelError
from ullage.planner.model_shape import GATED, Shape, bundled_shapes

LADDER = (*(f"qwen2.5-{size}b" for size in ("0.5", "1.5", "3", "7", "14", "32", "72")), "llama-3.1-405b")
"""Dense models by size: what a shape of another size is interpolated from."""


def shape_of_size(parameters: float, name: str) -> Shape:
    """A dense shape with about so many parameters, between two models of well-known proportions."""
    family = [bundled_shapes()[known] for known in LADDER]
    if not family[0].parameters / 4 <= parameters <= 5 * family[-1].parameters:
        raise ModelError(f"{name}: no transformer of this size is known", "give a size between 0.2B and 2000B")
    after = next((i for i, shape in enumerate(family) if shape.parameters >= parameters), len(family) - 1)
    low, high = family[max(0, after - 1)], family[max(1, after)]
    share = math.log(parameters / low.parameters) / math.log(high.parameters / low.parameters)

    def between(a: int, b: int, unit: int) -> int:
        return max(unit, unit * round(a * math.pow(b / a, share) / unit))

    hidden = between(low.hidden, high.hidden, 512)
    heads = hidden // 128
    shape = replace(
        high if share > 0.5 else low,
        name=name,
        layers=between(low.layers, high.layers, 1),
        hidden=hidden,
        heads=heads,
        head_size=128,
        # A power of two that divides the heads.
        kv_heads=min(heads & -heads, 1 << between(low.kv_heads, high.kv_heads, 1).bit_length() - 1),
    )
    # The MLP takes up what the rounding of the other widths left over.
    rest = parameters - (shape.parameters - shape.layers * GATED * shape.hidden * shape.mlp)
    shape = replace(shape, mlp=max(128, 64 * round(rest / (shape.layers * GATED * shape.hidden) / 64)))
    told = f"{name}: a dense shape between {low.name} and {high.name} is assumed; name a model for its own"
    return replace(shape, assumption=told)
