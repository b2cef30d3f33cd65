"""The kernels of `kernels/head.py`: one program works through the logits of one position."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_BLOCK = 8192
BACKWARD_BLOCK = 8192


@triton.jit
def _transformed(x, scale, cap, temperature, has_cap: tl.constexpr):  # noqa: ANN001, ANN202 -- Triton's own types
    x = x * scale
    if has_cap:
        # tanh by its exponential: 2 sigmoid(2x) - 1
        x = cap * (2 * tl.sigmoid(2 * x / cap) - 1)
    return x / temperature


@triton.jit
def _forward(  # noqa: ANN202
    logits, targets, logprobs, entropies, normalisers,  # noqa: ANN001
    vocabulary, scale, cap, temperature,  # noqa: ANN001
    has_cap: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocabulary
    largest = -float("inf")
    total = 0.0
    weighted = 0.0
    for first in range(0, vocabulary, block):
        place = first + tl.arange(0, block)
        inside = place < vocabulary
        x = _transformed(tl.load(start + place, mask=inside, other=0.0), scale, cap, temperature, has_cap)
        x = tl.where(inside, x, -float("inf"))
        new = tl.maximum(largest, tl.max(x, 0))
        shrink = tl.exp(largest - new)
        e = tl.exp(x - new)
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, e * x, 0.0), 0)
        largest = new
    normaliser = largest + tl.log(total)
    target = _transformed(tl.load(start + tl.load(targets + row)), scale, cap, temperature, has_cap)
    tl.store(logprobs + row, target - normaliser)
    tl.store(entropies + row, normaliser - weighted / total)
    tl.store(normalisers + row, normaliser)


@triton.jit
def _backward(  # noqa: ANN202
    logits, gradient, targets, normalisers, entropies, grad_logprobs, grad_entropies,  # noqa: ANN001
    vocabulary, scale, cap, temperature,  # noqa: ANN001
    has_cap: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    # The gradient takes the first half of its row's own memory. One program works through a row from the left, so what
    # it overwrites with two bytes an element has been read, at four bytes an element, before.
    row = tl.program_id(0).to(tl.int64)
    normaliser, entropy = tl.load(normalisers + row), tl.load(entropies + row)
    up, up_entropy = tl.load(grad_logprobs + row), tl.load(grad_entropies + row)
    target = tl.load(targets + row)
    for first in range(0, vocabulary, block):
        place = first + tl.arange(0, block)
        inside = place < vocabulary
        raw = tl.load(logits + row * vocabulary + place, mask=inside, other=0.0)
        tl.debug_barrier()
        x = _transformed(raw, scale, cap, temperature, has_cap)
        log_p = x - normaliser
        # d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
        grad = -tl.exp(log_p) * (up + up_entropy * (log_p + entropy))
        grad = tl.where(place == target, grad + up, grad) * (scale / temperature)
        if has_cap:
            share = x * temperature / cap
            grad = grad * (1 - share * share)
        tl.store(gradient + 2 * row * vocabulary + place, grad.to(gradient.dtype.element_ty), mask=inside)


def forward(
    logits: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    entropies: Tensor,
    normalisers: Tensor,
    scale: float,
    softcap: float,
    temperature: float,
) -> None:
    rows, vocabulary = logits.shape
    _forward[(rows,)](
        logits, targets, logprobs, entropies, normalisers, vocabulary, scale, softcap or 1.0, temperature,
        has_cap=softcap != 0, block=FORWARD_BLOCK, num_warps=16,
    )  # fmt: skip


def backward_(
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
    rows, vocabulary = logits.shape
    _backward[(rows,)](
        logits, logits.view(torch.bfloat16), targets, normalisers, entropies, grad_logprobs, grad_entropies,
        vocabulary, scale, softcap or 1.0, temperature,
        has_cap=softcap != 0, block=BACKWARD_BLOCK, num_warps=16,
    )  # fmt: skip
