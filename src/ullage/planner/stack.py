"""The decoder layers of a pass by closed form: what each of them keeps, where that waits, and the worst layer.

Numbers are those of a trace (run/predict.py), which is exact against an H200: in the MLP's backward pass the gradients
of three tensors are there when one that was saved is gone, which is 2 T i more than the layer keeps, and T h come from
the layer above.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ullage.planner import components as c
from ullage.planner.components import Pass, Term, term
from ullage.planner.model_shape import Shape


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The layers of a role that is trained, in a micro-batch."""

    shape: Shape
    a: Pass
    recomputed: int = 0
    """Layers that run again, evenly spread so that the last one is the last of them (engine/recompute.py)."""
    matmuls: bool = False
    """Those make only what is cheap again."""
    leaving: int = 0
    """Layers whose activations wait on the host."""
    ahead: bool = False
    """They leave and return beside the computation, evenly spread; else the first ones do, when they are needed."""
    quantisation: c.Quantisation | None = None

    @cached_property
    def runs_again(self) -> list[bool]:
        layers, count = self.shape.layers, self.recomputed
        return [(index + 1) * count // layers > index * count // layers for index in range(layers)]

    @cached_property
    def leaves(self) -> list[bool]:
        """As engine/offload.py chooses; the last one always stays."""
        others = self.shape.layers - 1
        if not self.ahead:
            return [index < self.leaving for index in range(self.shape.layers)]
        return [index < others and index * self.leaving % others < self.leaving for index in range(self.shape.layers)]

    @cached_property
    def kept(self) -> list[float]:
        """Bytes that each layer keeps until its backward pass, wherever.

        Below the first layer of a model that is frozen but for adapters nothing has a gradient: its first norm keeps
        no float32 copy.
        """
        full, light = self._saved, c.kept_by_recompute(self.shape, self.a, matmuls=self.matmuls)
        found = [light if again else full for again in self.runs_again]
        if self.a.rank and not self.runs_again[0] and not self.a.compiled:
            found[0] -= self.a.tokens * (2 * self.a.width * self.shape.hidden + 4)
        return found

    @cached_property
    def moved(self) -> list[float]:
        """The part of it that goes to the host."""
        inputs = c.kept_by_recompute(self.shape, self.a, matmuls=False)
        inputs = inputs if inputs >= c.LEAST_MOVED else 0.0
        rows = zip(self.kept, self.runs_again, self.leaves, strict=True)
        return [
            (kept - self._small if self._remade or not again else inputs) if leaves else 0.0
            for kept, again, leaves in rows
        ]

    def staying(self) -> Term:
        """All that is on the device when the forward pass ends."""
        return term(
            "activations",
            sum(self.kept) - sum(self.moved) + self._positions,
            "layers kept x saved + layers recomputed x kept of each - what waits on the host + embedded positions",
            T=self.a.tokens,
            saved=self._saved,
            each=c.kept_by_recompute(self.shape, self.a, matmuls=self.matmuls),
            kept=self.shape.layers - self.recomputed,
            recomputed=self.recomputed,
            away=sum(self.moved),
        )

    def worst_layer(self) -> list[Term]:
        """Activations of the layers below and the layer that needs most: mostly the last one."""
        below, layer, again, arriving = max(self._layers(), key=lambda found: found[0] + sum(found[2:]))
        passing = self._passing()
        return [
            term("activations", below, "kept by this layer and those below, less what waits on the host", layer=layer),
            term(
                "working_layer",
                again + passing + arriving,
                "saved of one layer, run again + 2 B x (T (i + h) + max(T, h) i) + what returns from the host",
                T=self.a.tokens,
                again=again,
                passing=passing,
                arriving=arriving,
            ),
        ]

    def last_forward(self) -> Term:
        """The MLP of the last layer in its forward pass, beside what all layers keep, its own but for the last product.

        Without recompute three hidden states are there: the embedding, and the sums before and after attention. With
        `matmuls` the sums are kept, and the norm's result, the activation and the gated product are there.
        """
        h, mlp = self.shape.hidden, c.mlp_width(self.shape)
        if not self.recomputed:
            return self._forward_term(3 * h, 0)
        return self._forward_term(2 * h, (2 if self._remade else 3) * mlp)

    def last_norm(self) -> Term:
        """The backward pass of the norm before the head: its float32 input, and five of its size (24 h T in all)."""
        count = 0 if self.a.compiled else 12 * self.a.width * self.shape.hidden * self.a.tokens
        return term("working_layer", count, "24 B x h T, the last norm", h=self.shape.hidden, T=self.a.tokens)

    def _layers(self) -> Iterator[tuple[float, int, float, float]]:
        """From the last to the first: bytes of itself and those below, its place, what runs again and what arrives."""
        below = sum(self.kept) - sum(self.moved) + self._positions
        for index in reversed(range(self.shape.layers)):
            before = next((i for i in reversed(range(index)) if self.leaves[i]), None) if self.ahead else None
            arriving = self.moved[index] + (0.0 if before is None else self.moved[before])
            yield below, index, self._again if self.runs_again[index] else 0.0, arriving
            below -= self.kept[index] - self.moved[index]

    @property
    def _remade(self) -> bool:
        """In other layers than these, `matmuls` is taken to add as much as if everything ran again."""
        return self.matmuls and self.shape.remakes

    @property
    def _positions(self) -> int:
        """Cosines and sines, which all layers share."""
        return 2 * self.a.width * self.a.tokens * (self.shape.head_size + self.shape.rope_head_size)

    @cached_property
    def _saved(self) -> float:
        return c.saved_by_layer(self.shape, self.a)

    @cached_property
    def _small(self) -> float:
        """What a layer saves in tensors that are not worth a copy: adapters' thin results, numbers for each head."""
        shape, a = self.shape, self.a
        keys = (a.tokens + a.more_keys) * a.width * shape.keys
        norms = [] if self._remade else [4 * a.tokens] * 2
        parts = [*[a.tokens * a.width * a.rank] * 7, 4 * a.tokens * shape.heads, *norms, keys, keys]
        return float(sum(part for part in parts if part < c.LEAST_MOVED))

    @cached_property
    def _again(self) -> float:
        """What running a layer again adds to what it kept; with `matmuls` its activation and gated product."""
        return 2 * self.a.tokens * self.a.width * c.mlp_width(self.shape) if self._remade else self._saved

    def _passing(self) -> float:
        """Gradients in the MLP, beyond what the layer saved: two tensors of its width and a hidden state.

        Where tokens are few, the gradient of a weight is larger than the second. A quantised weight is made wide when
        one of the two, or none, is there.
        """
        shape, a = self.shape, self.a
        if shape.experts or a.compiled:
            return c.working_layer(shape, a, recomputed=False).bytes
        each, hidden = (a.width * a.tokens * width for width in (shape.mlp, shape.hidden))
        if a.rank:
            return hidden + max(2 * each, each + self._plain, self._made)
        return hidden + each + max(each, a.width * shape.hidden * shape.mlp)

    @property
    def _plain(self) -> int:
        """A quantised weight in its plain form."""
        return c.dequantised(self.shape, width=self.a.width).bytes if self.quantisation else 0

    @property
    def _made(self) -> int:
        """The same while it is made."""
        if self.quantisation is None:
            return 0
        return c.dequantised(self.shape, width=c.made_width(self.quantisation, self.a.width)).bytes

    def _forward_term(self, hidden: int, mlp: int) -> Term:
        a, plain = self.a, self._made
        # A weight is made wide for the last product, when one tensor of the MLP's width is left.
        count = max(a.width * a.tokens * (hidden + mlp), a.width * a.tokens * (hidden + mlp // 3) + plain)
        return term(
            "working_layer",
            count,
            "2 B x T of the last layer's forward pass, or less and a weight in its plain form",
            T=a.tokens,
            width=hidden + mlp,
            plain=plain,
        )


def forward_attention(shape: Shape, a: Pass) -> Term:
    """A layer's attention without gradients: two hidden states, queries, keys, values, its output and normalisers.

    Keys and values that samples share are there once more, gathered.
    """
    keys = shape.keys + shape.kv_heads * shape.head_size
    gathered = a.tokens + a.more_keys if a.more_keys else 0
    numbers = a.tokens * (2 * shape.hidden + shape.query + shape.values + keys) + gathered * keys
    count = a.width * numbers + 4 * shape.heads * a.tokens
    formula = "2 B x (T (2 h + 2 q + 2 k) + 2 k x keys gathered) + 4 n T"
    return term("working_layer", count, formula, T=a.tokens, k=shape.keys, gathered=gathered)
