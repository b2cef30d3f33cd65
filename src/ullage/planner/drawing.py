"""The embedded engine by closed form: prompts through the model, tokens drawn, and the graphs that stay.

On a GPU a step of decoding is a captured graph, whose temporaries lie in a pool of the allocator that is nobody else's
from then on: reserved, but not allocated. Before it is captured it runs on a queue of its own, and cuBLAS keeps a
workspace for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ullage.config.tree import Config
from ullage.planner import components as c
from ullage.planner.allocator import LARGE_SEGMENT
from ullage.planner.components import MIB, Pass, Term, term
from ullage.planner.model_shape import Shape

if TYPE_CHECKING:
    from ullage.planner.phases import Layout

SEGMENTS, PREFIX_SEGMENTS, SEGMENT_TOKENS = 16, 8, 512
"""Pieces, at most, that a context and a shared prompt are divided into, and tokens of one (model/kernels/paged.py)."""
LEAST_SHARED, LEAST_MEMBERS = 128, 4
"""Tokens of a prompt, and samples of it, from which on it is read once for all (rollout/embedded/requests.py)."""
SMALL_BLOCKS = 4 * MIB
"""Of up to 1 MiB, which have segments of their own: those of a few dozen rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Samples that are decoded at once."""

    shape: Shape
    """What a rank has of the model."""
    vocabulary: int
    """All of it: logits are drawn from whole."""
    slots: int
    n: int
    """Samples of a prompt."""
    prompt: int
    longest: int
    """Tokens of a sequence."""
    truncated: bool
    """By top-p or top-k."""
    deterministic: bool
    width: int
    rank: int
    quantisation: c.Quantisation | None

    @property
    def reads_prompts_once(self) -> bool:
        """For all samples of each that are drawn side by side."""
        return self.n >= LEAST_MEMBERS and self.prompt >= LEAST_SHARED and not self.deterministic

    @property
    def prefill(self) -> Pass:
        """A pass over prompts."""
        most = min(c.PREFILL_TOKENS, c.PREFILL_ELEMENTS // self.shape.hidden)
        tokens = min(max(most // self.prompt, 1), -(-self.slots // self.n)) * self.prompt
        return Pass(tokens=tokens, positions=0, width=self.width, rank=self.rank)

    def logits(self) -> Term:
        """In float32, which the sampler reads once; under top-p or top-k a scaled copy, and which ids are left."""
        each = 10 if self.truncated else 4
        formula = f"{each} B x slots x V"
        return term("head", each * self.slots * self.vocabulary, formula, slots=self.slots, V=self.vocabulary)

    def graphs(self) -> Term:
        """The pool of captured steps: logits, or a quantised weight in its plain form, and what else a layer makes.

        The sum of both, though layers are through when logits come: what then still lives lies between the blocks that
        are free. `ullage bench rollout` measures it (graphs_mib).
        """
        logits, wide, layer = self.logits().bytes, self._wide_bytes, self._layer_bytes
        count = -(-(max(logits, wide) + layer) // LARGE_SEGMENT) * LARGE_SEGMENT + SMALL_BLOCKS
        formula = "pool of captured steps, reserved: max(logits, plain weight) + a layer's, in 20 MiB, + small blocks"
        return term("graphs", count, formula, logits=logits, plain=wide, layer=layer, small=SMALL_BLOCKS)

    @property
    def _wide_bytes(self) -> int:
        if self.quantisation is None:
            return 0
        return c.dequantised(self.shape, width=c.made_width(self.quantisation, self.width)).bytes

    @property
    def _layer_bytes(self) -> int:
        """A layer in its attention, with the partial results that it merges, or in its MLP, whichever is more."""
        shape, each = self.shape, self.slots * self.width
        keys = shape.keys + shape.kv_heads * shape.head_size
        partial = 4 * self.slots * shape.heads * self._segments * (shape.head_size + 2)
        attention = each * (2 * shape.hidden + 2 * shape.query + keys + shape.values) + partial
        return max(attention, each * (4 * shape.hidden + (4 if self.rank else 3) * c.mlp_width(shape)))

    @property
    def _segments(self) -> int:
        """Of the longest sequence and, beside those, of a prompt that is read for many; one alone is not merged."""
        tokens = (c.pages_for(self.longest) + 1) * c.PAGE  # as wide as the engine's page table
        seen = min(tokens, self.shape.sliding_window or tokens)
        own = min(SEGMENTS, -(-seen // SEGMENT_TOKENS))
        if self.reads_prompts_once:
            return own + min(PREFIX_SEGMENTS, -(-tokens // SEGMENT_TOKENS))
        return own if own > 1 else 0


def sharing(config: Config, n: int) -> int:
    """How many samples of a prompt may be counted on to share its place in the cache.

    Every turn of an episode has a beginning of its own, and what is to be drawn the same in any company may not have to
    make room for others: what is prefilled again rounds differently on a GPU.
    """
    alone = config.environment.name is not None or config.actor_rollout_ref.rollout.deterministic
    return 1 if alone else n


def cache_tokens(*, slots: int, samples: int, n: int, prompt: int, response: int) -> int:
    """Room for all slots at full length, where n samples share a prompt, which lies there once.

    Slots one after another meet one prompt more than they could have whole. A sample may need a page beside those of
    its response, for its copy of the prompt's last one, and the engine keeps one free for each that may grow. Where
    stragglers of many prompts are drawn side by side, prompts need more; responses that have not grown to their full
    length leave it to them.
    """
    apart = slots * (c.pages_for(prompt + response) + 1)
    prompts = min(-(-samples // n), -(-(slots - 1) // n) + 1)
    together = prompts * c.pages_for(prompt) + slots * (max(2, c.pages_for(response)) + 1)
    return c.PAGE * min(apart, together)


def room_for(slots: int, layout: Layout) -> int:
    """Tokens in the cache when so many of its samples are drawn at once."""
    data, n = layout.config.data, layout.config.actor_rollout_ref.rollout.n
    return cache_tokens(
        slots=slots,
        samples=-(-data.train_batch_size // layout.sharding.data) * n,
        n=sharing(layout.config, n),
        prompt=data.max_prompt_length,
        response=data.max_response_length,
    )


def of_rollout(layout: Layout) -> Drawing:
    rollout = layout.config.actor_rollout_ref.rollout
    return _drawing(layout, layout.slots, rollout.n, truncated=rollout.top_p < 1 or rollout.top_k > 0)


def of_evaluation(layout: Layout) -> Drawing:
    """The engine at the settings of the evaluation."""
    val = layout.config.actor_rollout_ref.rollout.val_kwargs
    truncated = val.temperature > 0 and (val.top_p < 1 or val.top_k > 0)
    return _drawing(layout, layout.eval_slots, val.n, truncated=truncated)


def graphs(layout: Layout) -> list[Term]:
    """Of a run whose steps can be captured: one pool for all of them."""
    if layout.supervised or layout.shape.moving_rope:
        return []
    kinds = [of_rollout(layout), *([of_evaluation(layout)] if layout.config.data.val_files else [])]
    return [max((kind.graphs() for kind in kinds), key=lambda term: term.bytes)]


def _drawing(layout: Layout, slots: int, n: int, *, truncated: bool) -> Drawing:
    return Drawing(
        shape=layout.actor.shape,
        vocabulary=layout.shape.vocabulary,
        slots=slots,
        n=n,
        prompt=layout.config.data.max_prompt_length,
        longest=layout.longest,
        truncated=truncated,
        deterministic=layout.config.actor_rollout_ref.rollout.deterministic,
        width=layout.width,
        rank=layout.actor.rank,
        quantisation=layout.quantisation,
    )
