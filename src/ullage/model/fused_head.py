"""The LM head on a GPU: chunks of logits that fused kernels read once in each direction.

The product is recomputed in the backward pass; normalisers and entropies are kept, a number per position. The gradient
of the weight is summed over chunks in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ullage.model.kernels.head import head_gradient_, head_logprobs

if TYPE_CHECKING:
    from ullage.model.head import Head

CHUNK = 3072
"""Positions whose logits are alive at once: 1.7 GiB at a vocabulary of 152k. Fewer make thin products, and add the
weight's gradient up more often."""


class FusedLogprobs(torch.autograd.Function):
    """Log-prob of each target and entropy of each position's distribution: [M], [M]."""

    @staticmethod
    def forward(
        context: Any,  # noqa: ANN401 -- autograd's own
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalisers = (
            torch.empty(len(targets), dtype=torch.float32, device=hidden.device) for _ in range(3)
        )
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logits = product(hidden[part], weight, bias)
            numbers = head_logprobs(logits, targets[part], head.scale, head.softcap or 0.0, temperature)
            for whole, piece in zip((logprobs, entropies, normalisers), numbers, strict=True):
                whole[part] = piece
            del logits  # before the next chunk's are made
        context.save_for_backward(hidden, weight, bias, targets, normalisers, entropies)
        context.head, context.temperature, context.chunk = head, temperature, chunk
        return logprobs, entropies

    @staticmethod
    def backward(context: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, bias, targets, normalisers, entropies = context.saved_tensors
        head: Head = context.head
        needs_hidden, needs_weight, needs_bias = context.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.empty_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        for start in range(0, len(targets), context.chunk):
            part = slice(start, start + context.chunk)
            logits = product(hidden[part], weight, bias)
            head_gradient_(
                logits,
                targets[part],
                normalisers[part],
                entropies[part],
                grad_logprobs[part].contiguous(),
                grad_entropies[part].contiguous(),
                head.scale,
                head.softcap or 0.0,
                context.temperature,
            )
            gradient = logits.view(torch.bfloat16)[:, : weight.shape[0]]  # rows stay two widths apart
            if grad_bias is not None:
                grad_bias += gradient.sum(0, dtype=torch.float32)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[part])
            if grad_weight is not None:
                keep = 1.0 if start else 0.0
                torch.addmm(
                    grad_weight, gradient.t(), hidden[part], out_dtype=torch.float32, beta=keep, out=grad_weight
                )
            del logits, gradient  # before the next chunk's are made
        weight_gradient = None if grad_weight is None else grad_weight.to(weight.dtype)
        bias_gradient = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, weight_gradient, bias_gradient, None, None, None, None


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[M, V] in float32, without a float32 copy of the weight."""
    logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)
