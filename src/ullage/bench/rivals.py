"""Other people's formulas for the memory of a training run, as they state them, on the same configs as ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage.planner.phases import Layout

BITS = {"nf4": 4, "int8": 8, None: 16}
KEPT_BY_CHECKPOINTING = {"full": 1 / 4, "matmuls": 1 / 2}
"""The methodology divides by 2 to 4; more is recomputed under `full`."""
KEPT_BY_OFFLOAD = 0.3
"""Between the 60 and 80 % that it says offloading takes away."""


@dataclass(frozen=True, slots=True)
class Published:
    """A figure from a paper, on its own runs: nothing here reproduces it."""

    name: str
    worst_percent: float
    source: str


LLMEM = Published(
    "LLMem, as published", 1.6, "arXiv:2404.10933: errors of up to 1.6 % on one GPU, fine-tuning, on its own runs"
)


def accelerate(layout: Layout) -> int:
    """`accelerate estimate-memory` 1.15: the largest of weights, gradients, optimizer and step.

    In half precision that is the optimizer, twice the size in float32. The model is what `AutoModel` makes, which has
    no output head. Of adapters and quantised training it says nothing: there it is given the size of the weights.
    """
    parameters = layout.shape.trunk_parameters
    if layout.actor.rank:
        return parameters * BITS[layout.quantisation] // 8
    float32 = 4 * parameters
    return max(float32, float32 + float32 // 2, 2 * float32)


def methodology(layout: Layout) -> int:
    """The sum that guides to verl give: parameters, gradients, Adam, activations, KV cache and communication.

    Activations are tokens x hidden x layers x 2 B, the KV cache has the width of the hidden state, and buffers for
    communication need several GPUs. It knows one model: neither critic nor reference has a term.
    """
    shape, chosen, trained = layout.shape, layout.chosen, layout.actor.parameters
    optimizer = {"adamw": 2 * 2 * trained, "adamw_8bit": trained, "sgd": 2 * trained}[layout.actor.optim.optimizer]
    kept = 1.0 if chosen.recompute == "none" else KEPT_BY_CHECKPOINTING.get(str(chosen.recompute), 1 / 2)
    if chosen.activation_offload != "none":
        kept *= KEPT_BY_OFFLOAD
    weights = shape.parameters * BITS[layout.quantisation] // 8
    activations = kept * chosen.tokens * shape.hidden * shape.layers * 2
    cache = layout.slots * layout.longest * shape.layers * shape.hidden * 2 * 2
    return round(weights + 2 * trained + optimizer + activations + cache)


RIVALS: dict[str, Callable[[Layout], int]] = {
    "accelerate estimate-memory": accelerate,
    "guides' sum of parts": methodology,
}
