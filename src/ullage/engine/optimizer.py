"""AdamW in place over the model's own parameters, with flat gradient and master buckets.

Weights never move, so the rollout engine (and later captured graphs, offload and sharding) can keep reading them.
Gradients are views into one buffer: zeroing, summing over ranks and the global norm are one operation each. Half
precision weights get a float32 master, because at a learning rate of 1e-6 round-to-nearest would lose every update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.config.tree import Optim


class Optimizer:
    """Owns gradients, moments and (for half precision) master weights of the parameters it is given."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], config: Optim) -> None:
        self.config = config
        self.names, tensors = zip(*[(name, p) for name, p in parameters if p.requires_grad], strict=True)
        self.parameters: list[Tensor] = list(tensors)
        dtype, device = self.parameters[0].dtype, self.parameters[0].device
        half = dtype in (torch.bfloat16, torch.float16)
        total = sum(p.numel() for p in self.parameters)
        self.gradient = torch.zeros(total, dtype=dtype, device=device)
        self.master: Tensor | None = None
        stepped = self.parameters
        if half:
            self.master = torch.empty(total, dtype=torch.float32, device=device)
            stepped = [view.requires_grad_() for view in self._views(self.master)]
            with torch.no_grad():
                torch._foreach_copy_(stepped, self.parameters)
        self._stepped = stepped
        for p, view in zip(self.parameters, self._views(self.gradient), strict=True):
            p.grad = view
        self.adam = torch.optim.AdamW(
            stepped, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
        self._create_state()

    @property
    def num_steps(self) -> int:
        """Updates made so far, also before a resume."""
        return int(self.adam.state[self._stepped[0]]["step"])

    def zero_grad(self) -> None:
        self.gradient.zero_()

    def step(self, learning_rate: float, ranks: Communicator) -> float:
        """Sum gradients over ranks, clip, update. Returns the gradient norm before clipping; non-finite: no update."""
        ranks.sum_tensor_(self.gradient)
        norm = float(
            torch.linalg.vector_norm(self.gradient, dtype=torch.promote_types(self.gradient.dtype, torch.float32))
        )
        if not math.isfinite(norm):
            return norm
        if norm > self.config.clip_grad:
            self.gradient.mul_(self.config.clip_grad / (norm + 1e-6))
        self.adam.param_groups[0]["lr"] = learning_rate
        if self.master is None:
            self.adam.step()
            return norm
        for view, gradient in zip(self._stepped, self._views(self.gradient.float()), strict=True):
            view.grad = gradient
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self._stepped)
        for view in self._stepped:
            view.grad = None
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs beside the weights."""
        state = {}
        for name, p in zip(self.names, self._stepped, strict=True):
            for key, value in self.adam.state[p].items():
                state[f"{key}/{name}"] = value
            if self.master is not None:
                state[f"master/{name}"] = p.detach()
        return state

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's tensors into place."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])

    def nbytes(self) -> dict[str, int]:
        """Bytes by component, as the memory report names them."""
        moments = sum(v.nbytes for p in self._stepped for k, v in self.adam.state[p].items() if k != "step")
        master = 0 if self.master is None else self.master.nbytes
        return {"gradients": self.gradient.nbytes, "optimizer": moments, "master": master}

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self.parameters]
        return [part.view_as(p) for part, p in zip(flat.split(sizes), self.parameters, strict=True)]

    def _create_state(self) -> None:
        """Moments exist from the start, at their final size, so that no later step sets a new high-water mark."""
        for p in self._stepped:
            self.adam.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format).detach(),
                "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format).detach(),
            }


def learning_rate(config: Optim, step: int, total_steps: int) -> float:
    """Rate of update step `step` (from 0): linear warm-up, then constant or a cosine down to `min_lr_ratio`."""
    warmup = config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
