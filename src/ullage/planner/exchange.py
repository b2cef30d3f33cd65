"""Bytes that one rank sends to others in a step, by closed form: none of it is measured."""

from __future__ import annotations

from ullage.planner import components as c
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout
from ullage.planner.roles import Trained
from ullage.planner.sharding import REDUCED


def others(ranks: int) -> float:
    """The share of a ring's data that crosses each of its links."""
    return (ranks - 1) / ranks


def of_replicas(layout: Layout, role: Trained, mini_batches: int) -> float:
    """Gradients of whole replicas: summed around the ring, and back."""
    sharding = layout.sharding
    if sharding.shards > 1:
        return 0.0
    return 2 * mini_batches * layout.width * role.parameters * others(sharding.data * sharding.sequence)


def of_shards(layout: Layout, role: Trained, passes: int) -> float:
    """Weights gathered forward and again backward; gradients reduced in float32, then over the copies there are."""
    sharding = layout.sharding
    if sharding.shards == 1:
        return 0.0
    held = c.weights(role.shape, width=layout.width, quantisation=layout.quantisation, head=role.has_head).bytes
    copies = sharding.data * sharding.sequence // sharding.shards
    reduced = REDUCED * role.parameters * others(sharding.shards)
    over_copies = 2 * REDUCED * layout.part(role.parameters) * others(copies)
    return passes * (2 * held * others(sharding.shards) + reduced + over_copies)


def forward(layout: Layout, shape: Shape, tokens: int) -> float:
    """All that a forward pass over a rank's tokens waits for."""
    return of_matrices(layout, shape, tokens) + of_sequences(layout, shape, tokens)


def backward(layout: Layout, shape: Shape, tokens: int) -> float:
    """The same of a backward pass: gradients of keys and values go round with them."""
    return of_matrices(layout, shape, tokens) + 2 * of_sequences(layout, shape, tokens)


def of_matrices(layout: Layout, shape: Shape, tokens: int) -> float:
    """Sums over the parts of two matrices a layer, each around the ring and back."""
    return 2 * 2 * others(layout.sharding.tensor) * layout.width * tokens * shape.hidden * shape.layers


def of_sequences(layout: Layout, shape: Shape, tokens: int) -> float:
    """Keys and values of a rank's positions, to every other rank that has positions of the same sequences."""
    return 2 * (layout.sharding.sequence - 1) * layout.width * tokens * shape.keys * shape.layers
