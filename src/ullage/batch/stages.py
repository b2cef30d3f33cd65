"""The stages of a training step as frozen records: Rollouts -> Experience -> TrainBatch.

A later stage has every field of the earlier, so skipping one is a type error. Token ids stay ragged tuples (what was
sampled, never re-encoded); numbers per response token are right-padded tensors.

Shape letters: G prompts, N samples, T response tokens (padded to the longest).

Example: two prompts with two samples each
    prompts    ((5, 6), (7, 8, 9))
    group_N    [0, 0, 1, 1]
    responses  ((3, 2), (4, 4, 2), (2,), (3, 3, 2))
    mask_NT    [[1,1,0], [1,1,1], [1,0,0], [1,1,1]]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

PER_PROMPT = frozenset({"prompts", "order_G"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """What the engine sampled."""

    prompts: tuple[tuple[int, ...], ...]
    """[G] token ids."""
    order_G: Tensor
    """[G] place of each prompt in the step's global batch: mini-batches are cut by it, whatever rank holds it."""
    group_N: Tensor
    """[N] which prompt a sample answers."""
    responses: tuple[tuple[int, ...], ...]
    """[N] token ids, end token included."""
    mask_NT: Tensor
    """[N, T] True on tokens the policy sampled; False on padding and on tokens it was given."""
    rollout_logprobs_NT: Tensor
    """[N, T] log-probs the engine gave its own tokens."""
    finish_reasons: tuple[str, ...]
    """[N] `stop` or `length`."""

    def select(self, samples: Tensor) -> Self:
        """The stage with only these samples; prompts stay, so group numbers keep their meaning."""
        chosen = samples.tolist()
        changes: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in PER_PROMPT or value is None:
                continue
            if isinstance(value, Tensor):
                changes[field.name] = value[samples]
            else:
                changes[field.name] = tuple(value[i] for i in chosen)
        return dataclasses.replace(self, **changes)

    def to(self, device: torch.device) -> Self:
        """The stage with its tensors on a device."""
        moved: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device)
        return dataclasses.replace(self, **moved)

    def scored(self, *, rewards_N: Tensor, valid_N: Tensor) -> Experience:
        """Rewards arrive. A sample that could not be scored is invalid: its tokens carry no loss."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["mask_NT"] = self.mask_NT & valid_N[:, None]
        return Experience(
            **fields,
            rewards_N=rewards_N,
            valid_N=valid_N,
            signal_N=valid_N,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience(Rollouts):
    """Rollouts with rewards and, once evaluated, what the models think of them."""

    rewards_N: Tensor
    valid_N: Tensor
    """[N] False where no reward could be had."""
    signal_N: Tensor
    """[N] False where the algorithm knows the sample cannot change the weights: no model pass is spent on it."""
    old_logprobs_NT: Tensor | None = None
    """None: strictly on-policy, the update's own log-probs are the old ones."""
    ref_logprobs_NT: Tensor | None = None
    values_NT: Tensor | None = None

    def evaluated(
        self, *, old_logprobs: Tensor | None, ref_logprobs: Tensor | None, values: Tensor | None
    ) -> Experience:
        return dataclasses.replace(self, old_logprobs_NT=old_logprobs, ref_logprobs_NT=ref_logprobs, values_NT=values)

    def with_signal(self, signal_N: Tensor) -> Experience:
        return dataclasses.replace(self, signal_N=signal_N)

    def credited(self, *, advantages_NT: Tensor, returns_NT: Tensor | None = None) -> TrainBatch:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return TrainBatch(
            **fields,
            advantages_NT=advantages_NT,
            returns_NT=returns_NT,
            weights_NT=torch.zeros_like(advantages_NT),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch(Experience):
    """Experience with credit assigned: what an update consumes."""

    advantages_NT: Tensor
    returns_NT: Tensor | None
    weights_NT: Tensor
    """[N, T] share of each token in the mini-batch's loss; denominators over all ranks are already inside."""

    def weighted(self, weights_NT: Tensor) -> TrainBatch:
        return dataclasses.replace(self, weights_NT=weights_NT)


def pad_rows(rows: Sequence[Sequence[float]], *, width: int, dtype: torch.dtype) -> Tensor:
    """[N, width] tensor from ragged rows, zeros to the right."""
    padded = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return padded
