"""Layouts over several GPUs by closed form: what each rank keeps, and what it gathers, reduces and exchanges.

Bytes of FSDP2's buffers are those that a trace of `fully_shard` on a fake process group shows
(tests/run/test_sharded_trace.py): per group of parameters, one all-gathered flat buffer, the parameters copied out of
it, the next group's buffer, and in the backward pass gradients and the float32 input of their reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from ullage.base.errors import UsageError
from ullage.planner import components as c
from ullage.planner.components import Pass, Term, term
from ullage.planner.hardware import Machine
from ullage.planner.model_shape import Shape

REDUCED = 4
"""Bytes of a gradient in its reduce-scatter: float32."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the work of a run is divided: by samples, by the width of layers, by positions of a sequence."""

    data: int = 1
    """Replicas that each take a part of the batch."""
    tensor: int = 1
    """Ranks that share every matrix, the vocabulary's included."""
    sequence: int = 1
    """Ranks that share the positions of a pass."""
    shards: int = 1
    """Ranks of data x sequence that share one copy of weights, gradients and optimizer state (FSDP2)."""
    own_groups: bool = True
    """Embedding and head are gathered on their own; else they are the root group, gathered during a whole pass."""

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.sequence, self.shards) < 1 or self.data * self.sequence % self.shards:
            raise UsageError(f"{self}: no such layout", "give shards that divide data x sequence, none below 1")

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.sequence

    @property
    def text(self) -> str:
        """`data 8, tensor 2, shards 4`."""
        named = {"data": self.data, "tensor": self.tensor, "sequence": self.sequence, "shards": self.shards}
        return ", ".join(f"{name} {count}" for name, count in named.items() if count > 1) or "one rank"


def local_shape(shape: Shape, tensor: int) -> Shape:
    """What one of `tensor` ranks computes: its heads, its part of every MLP and of the vocabulary.

    Norms, the router and what latent attention compresses are on all of them; so are key-value heads, where there are
    fewer than ranks.
    """
    if tensor == 1:
        return shape
    return replace(
        shape,
        heads=-(-shape.heads // tensor),
        kv_heads=max(1, -(-shape.kv_heads // tensor)),
        mlp=-(-shape.mlp // tensor),
        expert_mlp=-(-shape.expert_mlp // tensor),
        shared_mlp=-(-shape.shared_mlp // tensor),
        vocabulary=-(-shape.vocabulary // tensor),
    )


def local_pass(a: Pass, sequence: int) -> Pass:
    """The positions of one of `sequence` ranks."""
    return replace(a, tokens=-(-a.tokens // sequence), positions=-(-a.positions // sequence))


def shared(held: Term, shards: int) -> Term:
    """A term of which every rank keeps its part."""
    if shards == 1:
        return held
    count, inputs = -(-held.bytes // shards), {**held.inputs, "shards": shards}
    return replace(held, bytes=count, formula=f"({held.formula}) / shards", inputs=inputs)


def exchanged(shape: Shape, a: Pass, sharding: Sharding) -> list[Term]:
    """Beside a layer: the sums that tensor-parallel ranks add up, the keys and values that go round a sequence."""
    found = []
    if sharding.tensor > 1:
        count = a.width * a.tokens * shape.hidden
        found.append(term("gather", count, "2 B x T h: sums over tensor-parallel ranks", T=a.tokens, h=shape.hidden))
    if sharding.sequence > 1:
        count = 2 * a.width * a.tokens * (shape.keys + shape.kv_heads * shape.head_size)
        found.append(
            term("gather", count, "2 stages x 2 B x T (keys + values) of another rank", T=a.tokens, keys=shape.keys)
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of parameters that FSDP2 gathers of one model, on a rank: its layers, its embedding and its head."""

    shape: Shape
    """Of the rank."""
    sharding: Sharding
    width: int
    quantisation: c.Quantisation | None = None
    has_head: bool = True
    trained: int = 0
    """Parameters of the largest layer that have a gradient; 0: only forward passes."""
    trains_tables: bool = False

    @cached_property
    def layer(self) -> int:
        """Bytes of the largest layer, gathered; none where every rank has all of it."""
        shape = self.shape
        if self.sharding.shards == 1:
            return 0
        if self.quantisation is None:
            return self.width * shape.layer_parameters
        packed = c.weights(shape, width=self.width, quantisation=self.quantisation, head=False).bytes
        return (packed - self.width * shape.table) // shape.layers

    @cached_property
    def table(self) -> int:
        """Bytes of the embedding, or the head."""
        return self.width * self.shape.table

    @cached_property
    def root(self) -> int:
        """Bytes that stay gathered during a whole pass: tied tables, which both ends need, or the root group."""
        if not self.has_head:
            return 0 if self.sharding.own_groups else self.table
        if self.shape.tied:
            return self.table
        return 0 if self.sharding.own_groups else 2 * self.table

    def forward_start(self) -> Term:
        """The embedding's group, which is given back before the first layer; the root, which is not."""
        if not self.root:
            return self._term(2 * self.table, "2 x embedding: gathered, and copied out")
        return self._term(2 * self.root + 2 * self.layer, "2 x root + 2 x layer: gathered, and copied out")

    def forward_layer(self) -> Term:
        return self._term(self.root + 3 * self.layer, "root + 3 x layer: gathered, copied out, the next one gathered")

    def forward_head(self) -> Term:
        if self.root or not self.has_head:
            return self._term(self.root + self.layer, "root + the last layer's buffer")
        return self._term(2 * self.table + self.layer, "2 x head, gathered and copied out, + the last layer's buffer")

    def backward_layer(self) -> Term:
        """Copied out, the next one gathered; gradients, and what their reduce-scatter reads."""
        count = self.root + 2 * self.layer + (self.width + REDUCED) * self.trained
        if self.root and self.trains_tables and self.has_head and not self.shape.tied:
            count += self.table  # the head's gradient waits for the embedding's
        return self._term(count, "root + 2 x layer + trained x (2 B gradient + 4 B reduced)")

    def backward_head(self) -> Term:
        count = (self.root or self.table * self.has_head) + self.layer
        return self._term(count, "head + the last layer, gathered ahead")

    def backward_table(self) -> Term:
        """An embedding's or a head's gradient on its way to all ranks, in a group of its own."""
        if not self.trains_tables or self.root:
            return self._term(0, "no such group")
        count = (self.width + REDUCED) * self.shape.table + -(-REDUCED * self.shape.table // self.sharding.shards)
        return self._term(count + self.layer, "V h x (2 B gradient + 4 B reduced + 4 B / shards) + layer")

    def backward_end(self) -> Term:
        """The root group's gradients; tied tables: weights, both gradients' sum, and the last layer's reduce-scatter,
        beside the two gradients themselves, which are the head's."""
        if not self.trains_tables or not self.root:
            return self._term(0, "no such group")
        if self.shape.tied and self.has_head:
            return self._term(2 * self.table + REDUCED * self.trained, "2 x 2 B x V h + 4 B x layer")
        parameters = self.root // self.width
        return self._term((self.width + REDUCED) * parameters, "root x (2 B gradient + 4 B reduced)")

    def _term(self, count: int, formula: str) -> Term:
        if self.sharding.shards == 1:
            return term("gather", 0, "every rank has all of it")
        return term(
            "gather", count, formula, layer=self.layer, table=self.table, root=self.root, shards=self.sharding.shards
        )


# --- which layout ---


def shardings(machine: Machine) -> list[Sharding]:
    """Every layout of a machine's GPUs: what exchanges most, tensor and sequence, stays inside a node."""
    inside = _divisors(machine.count)
    found = []
    for tensor, sequence in product(inside, inside):
        if machine.count % (tensor * sequence) == 0:
            data = machine.gpus // (tensor * sequence)
            found += [Sharding(data, tensor, sequence, shards) for shards in _divisors(data * sequence)]
    return found


def divides(shape: Shape, sharding: Sharding) -> bool:
    """Whether heads and MLPs come out even."""
    widths = (shape.heads, shape.mlp, shape.expert_mlp, shape.shared_mlp)
    return all(width % sharding.tensor == 0 for width in widths)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
