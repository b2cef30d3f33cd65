"""From per-token losses to one number: a weight per token, fixed on the whole mini-batch before it is split.

Because the weights carry the denominators of the whole mini-batch and of all ranks, `sum(loss * weight)` over any
split into micro-batches or ranks is the same loss.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Counts:
    """What the denominators are made of, summed over all ranks."""

    tokens: float
    """Tokens that carry loss."""
    sequences: float
    """Sequences with at least one such token."""


def count(mask_NT: Tensor) -> tuple[float, float]:
    """(tokens, sequences) of one rank's part of a mini-batch."""
    tokens_N = mask_NT.sum(-1)
    return float(tokens_N.sum()), float((tokens_N > 0).sum())


def token_weights(mask_NT: Tensor, mode: str, counts: Counts, *, scale: float, dtype: torch.dtype) -> Tensor:
    """Weight of every token under an aggregation mode of verl's `loss_agg_mode` (0.9 semantics)."""
    mask = mask_NT.to(dtype)
    if mode == "token-sum":
        return mask
    if mode == "token-mean":
        return mask / max(counts.tokens, 1.0)
    sequences = max(counts.sequences, 1.0)
    if mode == "seq-mean-token-sum":
        return mask / sequences
    if mode == "seq-mean-token-mean":
        return mask / (mask.sum(-1, keepdim=True) + 1e-8) / sequences
    if mode == "seq-mean-token-sum-norm":
        return mask / sequences / scale
    raise AssertionError(f"unknown aggregation mode {mode}")
