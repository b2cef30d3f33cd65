"""The LM head alone: time and peak of forward and backward, beside one that makes all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ullage.bench.clock import free, measure
from ullage.bench.report import GIB
from ullage.model.head import Head
from ullage.model.target import Target


def heads(target: Target, *, tokens: int, vocabulary: int, hidden_sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    return (_compare(target, tokens, vocabulary, hidden) for hidden in hidden_sizes)


def _compare(target: Target, tokens: int, vocabulary: int, hidden: int) -> dict[str, Any]:
    dtype, device = target.default_dtype, target.device
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, hidden, device=device) * 0.02).to(dtype).requires_grad_()
    inputs = torch.randn(tokens, hidden, device=device).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    head = Head(weight=weight, fused=target.fused_head(dtype))

    def ours() -> Tensor:
        return head.logprobs(inputs, targets, temperature=1.0, entropy=True)[0].sum()

    def naive() -> Tensor:
        logprobs = (inputs @ weight.t()).float().log_softmax(-1)
        return logprobs.gather(-1, targets[:, None]).sum()

    held = torch.cuda.memory_allocated(device) if target.kind == "cuda" else 0
    row: dict[str, Any] = {"hidden": hidden, "tokens": tokens, "vocabulary": vocabulary}
    for name, forward in (("ours", ours), ("naive", naive)):
        found = _measured(forward, [inputs, weight], target)
        row |= {f"{name}_ms": None, f"{name}_peak_gib": None}
        if found is not None:
            row[f"{name}_ms"] = round(1000 * found.seconds, 2)
            row[f"{name}_peak_gib"] = round((found.peak_bytes - held) / GIB, 2)
    row["weight_gradient_gib"] = round(weight.nbytes / GIB, 2)
    row["ratio"] = round(row["ours_ms"] / row["naive_ms"], 3) if row["naive_ms"] else None
    return row


def _measured(forward: Callable[[], Tensor], leaves: list[Tensor], target: Target) -> Any:  # noqa: ANN401 -- or None
    def work() -> None:
        forward().backward()
        for leaf in leaves:
            leaf.grad = None

    try:
        return measure(work, target, repeat=5, warm_up=2)
    except torch.OutOfMemoryError:
        return None
    finally:
        free(target)
