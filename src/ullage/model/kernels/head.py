"""The LM head's passes over its logits as operators: one read for log-prob and entropy, one for the gradient.

The kernels are in `head_triton.py`, plain-torch twins of both in `model/head.py`. Shapes: M positions, V vocabulary.
Logits are the raw product in float32; scale, soft cap and temperature are applied on the way.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("ullage::head_logprobs", mutates_args=())
def head_logprobs(
    logits: Tensor, targets: Tensor, scale: float, softcap: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of each target, entropy and log-normaliser of each row: [M], [M], [M]; a soft cap of 0 is none."""
    from ullage.model.kernels.head_triton import forward  # a trace needs only shapes

    rows = len(logits)
    logprobs, entropies, normalisers = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    forward(logits, targets, logprobs, entropies, normalisers, scale, softcap, temperature)
    return logprobs, entropies, normalisers


@head_logprobs.register_fake
def _(
    logits: Tensor, targets: Tensor, scale: float, softcap: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    del targets, scale, softcap, temperature
    rows = logits.new_empty(logits.shape[0])
    return rows, torch.empty_like(rows), torch.empty_like(rows)


@torch.library.custom_op("ullage::head_gradient", mutates_args=("logits",))
def head_gradient_(
    logits: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor,
    scale: float,
    softcap: float,
    temperature: float,
) -> None:
    """Replace the logits by the gradient of the raw product in bfloat16, in the first half of each row's memory."""
    from ullage.model.kernels.head_triton import backward_

    backward_(logits, targets, normalisers, entropies, grad_logprobs, grad_entropies, scale, softcap, temperature)


@head_gradient_.register_fake
def _(
    logits: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor,
    scale: float,
    softcap: float,
    temperature: float,
) -> None:
    del logits, targets, normalisers, entropies, grad_logprobs, grad_entropies, scale, softcap, temperature
