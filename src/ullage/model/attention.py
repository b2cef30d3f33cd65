"""One attention function for every architecture: Hugging Face models call it, a layout says what it means.

A `Layout` travels through the model as a keyword argument. `PackedLayout` here is the training and prefill pass over
blocks (a prompt and its responses); the rollout engine adds one that reads the paged cache.

Shapes: T packed tokens, H heads, K key-value heads, d head size, P prompt tokens, R response tokens of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ullage.base.errors import ModelError
from ullage.model.target import Target, put

NAME = "ullage"


class Extras(NamedTuple):
    """What some architectures add to plain attention."""

    scaling: float
    window: int
    """How many tokens back a token sees, itself included; 0 for no limit."""
    softcap: float | None
    sinks: Tensor | None
    """A learned logit per head that takes probability without contributing a value."""


class Layout(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        """[H, T, d], [K, T, d], [K, T, d] -> [T, H, d]."""


def attention(
    module: Any,  # noqa: ANN401 -- the attention layer of any architecture
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,  # noqa: ANN401 -- architectures pass keywords of their own
) -> tuple[Tensor, None]:
    """The function registered with transformers; query is [1, H, T, d]. Dropout is never applied."""
    if attention_mask is not None:  # the layout knows who sees whom; a mask of the model's own is part of its design
        raise ModelError(
            f"{type(module).__name__} makes an attention mask of its own", "choose a model with plain attention"
        )
    if layout is None:
        raise ModelError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention",
            "this architecture cannot be trained here yet; please report its name",
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    extras = Extras(scaling, sliding_window or 0, softcap, s_aux)
    out = layout.attend(module.layer_idx, query[0], key[0], value[0], extras)
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)


@dataclass(frozen=True, slots=True)
class Span:
    """Where a block lies in the packed row: `prompt` tokens from `start`, then its responses one after another."""

    start: int
    prompt: int
    responses: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass(frozen=True, slots=True)
class Sequences:
    """A packed row as sequences of queries, each with the keys it sees: its own and, for a response, its prompt's.

    The flash kernel aligns the causal mask to the end of both, so a response's first token sees the whole prompt.
    """

    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    key_places: Tensor | None
    """Where in the row each key stands; None: every token once, in order."""
    grouped: Mapping[str, Any]
    """How the kernel is told that there are fewer key-value heads than query heads. A field, because compiled layers
    cannot look at a signature once."""

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> Sequences:
        queries: list[int] = []
        keys: list[int] = []
        places: list[range] = []
        for span in spans:
            alone = len(span.responses) <= 1
            first = span.total if alone else span.prompt
            queries.append(first)
            keys.append(first)
            places.append(range(span.start, span.start + first))
            start = span.start + span.prompt
            for length in () if alone else span.responses:
                if length:
                    queries.append(length)
                    keys.append(span.prompt + length)
                    places.append(range(span.start, span.start + span.prompt))
                    places.append(range(start, start + length))
                start += length
        shared = any(len(span.responses) > 1 for span in spans)
        return cls(
            _ends(queries, device),
            _ends(keys, device),
            max(queries),
            max(keys),
            put(torch.cat([torch.arange(part.start, part.stop) for part in places]), device) if shared else None,
            _grouped(),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        """[H, T, d], [K, T, d], [K, T, d] -> [T, H, d] by the flash kernel for sequences of any length."""
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if self.key_places is not None:
            key, value = (_Gathered.apply(x, self.key_places) for x in (key, value))  # type: ignore[no-untyped-call]
        out = varlen_attn(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            self.query_ends,
            self.key_ends,
            self.longest_query,
            self.longest_key,
            scale=extras.scaling,
            window_size=(extras.window - 1, 0) if extras.window else (-1, 0),
            **self.grouped,
        )
        assert isinstance(out, Tensor), "no log-sum-exp was asked for"
        return out


@cache
def _grouped() -> dict[str, Any]:
    """torch 2.11 takes fewer key-value heads than query heads as they are; later versions want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[sequences + 1] where each begins, and the end of the last."""
    return put(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


class _Gathered(torch.autograd.Function):
    """Rows of a tensor, some of them several times; their gradients are added up in float32."""

    @staticmethod
    def forward(context: Any, rows: Tensor, places: Tensor) -> Tensor:  # noqa: ANN401 -- autograd's own
        context.save_for_backward(places)
        context.shape = rows.shape
        return rows[places]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (places,) = context.saved_tensors
        total = torch.zeros(context.shape, dtype=torch.float32, device=gradient.device)
        total.index_add_(0, places, gradient.float())
        return total.to(gradient.dtype), None


class PackedLayout:
    """Causal attention inside each block; a response sees its prompt and itself, never a sibling."""

    def __init__(self, spans: Sequence[Span], target: Target, dtype: torch.dtype) -> None:
        self.spans = spans
        self.device = target.device
        self.wide = target.wide_attention(dtype)
        self._siblings: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._sequences = Sequences.of(spans, target.device) if target.varlen_attention(dtype) else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
        del layer
        if self._sequences is not None and extras.softcap is None and extras.sinks is None:
            return self._sequences.attend(query, key, value, extras)
        narrow = query.dtype
        if self.wide:
            query, key, value = query.double(), key.double(), value.double()
        parts = [part for i in range(len(self.spans)) for part in self._block(i, query, key, value, extras)]
        return torch.cat(parts, dim=1).transpose(0, 1).to(narrow)

    def _block(self, index: int, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> list[Tensor]:
        """[H, tokens, d] pieces of one block, in packed order."""
        span = self.spans[index]
        whole = slice(span.start, span.start + span.total)
        if len(span.responses) <= 1:
            return [_causal(query[:, whole], key[:, whole], value[:, whole], extras)]
        prompt = slice(span.start, span.start + span.prompt)
        first = _causal(query[:, prompt], key[:, prompt], value[:, prompt], extras)
        gather, mask, valid = self._sibling_tables(index, extras.window)
        siblings = len(gather)
        queries = query[:, gather].transpose(0, 1)  # [siblings, H, R, d]
        keys, values = (
            torch.cat([x[None, :, prompt].expand(siblings, -1, -1, -1), x[:, gather].transpose(0, 1)], dim=2)
            for x in (key, value)
        )
        out = masked_attention(queries, keys, values, mask, extras)
        return [first, out.transpose(0, 1).flatten(1, 2)[:, valid]]

    def _sibling_tables(self, index: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gather indices [siblings, R], mask [siblings, 1, R, P + R] and the padded places that are real [tokens]."""
        if (index, window) not in self._siblings:
            span = self.spans[index]
            longest = max(span.responses)
            lengths = torch.tensor(span.responses, device=self.device)
            offset = torch.arange(longest, device=self.device)
            start = span.start + span.prompt + lengths.cumsum(0) - lengths
            real = offset < lengths[:, None]
            gather = torch.where(real, start[:, None] + offset, span.start)
            position = span.prompt + offset
            key_position = torch.arange(span.prompt + longest, device=self.device)
            mask = key_position <= position[:, None]  # [R, P + R]
            if window:
                mask &= key_position > position[:, None] - window
            mask = mask.expand(len(lengths), 1, -1, -1)
            self._siblings[index, window] = (gather, mask, real.flatten().nonzero()[:, 0])
        return self._siblings[index, window]


def _causal(query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> Tensor:
    """Plain causal attention of one sequence, [H, T, d] -> [H, T, d]."""
    tokens = query.shape[1]
    if extras.softcap is None and extras.sinks is None and not (extras.window and extras.window < tokens):
        return functional.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=extras.scaling, enable_gqa=True
        )[0]
    position = torch.arange(tokens, device=query.device)
    mask = position <= position[:, None]
    if extras.window:
        mask &= position > position[:, None] - extras.window
    return masked_attention(query[None], key[None], value[None], mask, extras)[0]


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, extras: Extras) -> Tensor:
    """Attention under a boolean mask, [batch, H, Q, d] over [batch, K, T, d]."""
    if extras.softcap is None and extras.sinks is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=extras.scaling, enable_gqa=True
        )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)) * extras.scaling
    if extras.softcap is not None:
        scores = torch.tanh(scores / extras.softcap) * extras.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if extras.sinks is None:
        return scores.softmax(-1) @ value
    sinks = extras.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ value
