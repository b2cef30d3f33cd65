"""The LM head without the `[tokens, vocabulary]` tensor: log-probs and entropy chunk by chunk, recomputed in backward.

Logits are at least float32 (float64 stays float64) with the temperature inside; only positions that carry loss come
here. Shapes: M positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 24
"""Logits alive at once: 64 MiB in float32."""
LOWEST = -1e30
"""The logit of an id that cannot be drawn."""
MIN_ROWS = 16
"""CPU matrix products of fewer rows, divided among threads, take another path, which rounds differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The output projection of a model and what the model does to its logits."""

    weight: Tensor
    """[V, D], the model's own parameter."""
    bias: Tensor | None = None
    scale: float = 1.0
    """Some architectures multiply their logits (Cohere, Granite)."""
    softcap: float | None = None
    """Gemma bounds its logits: `softcap * tanh(logits / softcap)`."""
    fused: bool = False
    """Use the kernels for CUDA (half precision)."""

    def logits(self, hidden_MD: Tensor, temperature: float) -> Tensor:
        """[M, V]; for a few positions at a time."""
        logits = self._capped(hidden_MD)
        return logits if temperature == 1.0 else logits / temperature

    def logprobs(
        self,
        hidden_MD: Tensor,
        targets_M: Tensor,
        *,
        temperature: float,
        entropy: bool,
        supports: Sequence[Tensor] | None = None,
        chunk: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob of each target and, where asked for, the entropy of each position's distribution: [M], [M].

        With `supports` [M], each position's distribution is that of the ids given for it, and no others.
        """
        if self.fused and supports is None:
            from ullage.model.fused_head import CHUNK, FusedLogprobs

            values, entropies = FusedLogprobs.apply(  # type: ignore[no-untyped-call]
                hidden_MD, self.weight, self.bias, targets_M, self, temperature, chunk or CHUNK
            )
            return values, entropies if entropy else None
        chunk = chunk or max(1, CHUNK_LOGITS // self.weight.shape[0])
        values, entropies = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_MD, self.weight, self.bias, targets_M, self, temperature, entropy, supports, chunk
        )
        return values, entropies if entropy else None

    def _capped(self, hidden: Tensor) -> Tensor:
        """Logits before the temperature."""
        out = _matmul(hidden, self.weight.t())
        if self.bias is not None:
            out = out + self.bias
        if self.scale != 1.0:
            out = out * self.scale
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap


def without(logits_MV: Tensor, support_MV: Tensor) -> Tensor:
    """Logits with the ids outside the support made impossible; a finite number, so that 0 * log 0 stays 0."""
    return logits_MV.masked_fill(~support_MV, LOWEST)


def _supported(logits: Tensor, supports: Sequence[Tensor] | None, part: slice) -> Tensor:
    """The logits of a chunk, restricted to the ids that each of its positions was drawn from."""
    if supports is None:
        return logits
    chosen = supports[part]
    rows = torch.arange(len(chosen)).repeat_interleave(torch.tensor([len(ids) for ids in chosen]))
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    mask[rows.to(logits.device), torch.cat(list(chosen)).long().to(logits.device)] = True
    return without(logits, mask)


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """A product in at least float32, without a float32 copy of the weights where the device can avoid it."""
    if left.dtype not in (torch.bfloat16, torch.float16):
        rows = left.shape[0]
        if rows >= MIN_ROWS:
            return left @ right
        return (torch.cat([left, left.new_zeros(MIN_ROWS - rows, left.shape[1])]) @ right)[:rows]
    if left.device.type != "cpu":
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,  # noqa: ANN401 -- autograd's own
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        temperature: float,
        with_entropy: bool,
        supports: Sequence[Tensor] | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        context.save_for_backward(hidden, weight, bias, targets)
        context.head, context.temperature, context.chunk = head, temperature, chunk
        context.with_entropy, context.supports = with_entropy, supports
        logprobs = hidden.new_empty(len(targets), dtype=torch.promote_types(hidden.dtype, torch.float32))
        entropies = torch.empty_like(logprobs) if with_entropy else logprobs.new_empty(0)
        for part in _chunks(len(targets), chunk):
            logits = _supported(head.logits(hidden[part], temperature), supports, part)
            normaliser = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, targets[part, None])[:, 0] - normaliser
            if with_entropy:
                mean_logit = (logits - normaliser[:, None]).exp_().mul_(logits).sum(-1)
                entropies[part] = normaliser - mean_logit
        return logprobs, entropies

    @staticmethod
    def backward(context: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden, weight, bias, targets = context.saved_tensors
        head: Head = context.head
        wide = grad_logprobs.dtype
        needs_hidden, needs_weight, needs_bias = context.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needs_bias else None
        use_entropy = context.with_entropy and bool(grad_entropies.any())
        for part in _chunks(len(targets), context.chunk):
            capped = head.logits(hidden[part], 1.0)
            logits = capped if context.temperature == 1.0 else capped / context.temperature
            logits = _supported(logits, context.supports, part)
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
            log_p = logits - logits.logsumexp(-1, keepdim=True)
            if use_entropy:
                p = log_p.exp()
                entropy = -(p * log_p).sum(-1, keepdim=True)
                grad = log_p.add_(entropy).mul_(grad_entropies[part, None]).add_(grad_logprobs[part, None])
                grad = grad.mul_(p).neg_()
            else:
                grad = log_p.exp_().mul_(-grad_logprobs[part, None])
            grad.scatter_add_(-1, targets[part, None], grad_logprobs[part, None])
            if head.scale != context.temperature:
                grad *= head.scale / context.temperature
            if head.softcap is not None:
                grad *= 1 - (capped / head.softcap).square()
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += _matmul(grad.t(), hidden[part])
        weight_grad = None if grad_weight is None else grad_weight.to(weight.dtype)
        bias_grad = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, weight_grad, bias_grad, None, None, None, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
