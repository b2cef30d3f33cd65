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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

PER_PROMPT = frozenset({"prompts", "order_G", "baseline_G"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """What the engine sampled."""

    prompts: tuple[tuple[int, ...], ...]
    """[G] token ids."""
    order_G: Tensor
    """[G] place of each prompt in the step's global batch: mini-batches are cut by it, whatever rank holds it."""
    group_N: Tensor
    """[N] which prompt a sample answers."""
    sample_N: Tensor
    """[N] a number that no other sample of the step has, on any rank."""
    responses: tuple[tuple[int, ...], ...]
    """[N] token ids, end token included."""
    mask_NT: Tensor
    """[N, T] True on tokens the policy sampled; False on padding and on tokens it was given."""
    rollout_logprobs_NT: Tensor | None
    """[N, T] log-probs the engine gave its own tokens; None where no engine sampled them."""
    finish_reasons: tuple[str, ...]
    """[N] `stop` or `length`."""
    supports: tuple[tuple[Tensor, ...], ...] | None = None
    """[N] for each response token the ids it was drawn from, where top-p or top-k left others out; None: all ids."""

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

    def moved(self, move: Callable[[Tensor], Tensor]) -> Self:
        """The stage with its tensors elsewhere."""
        moved: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = move(value)
        return dataclasses.replace(self, **moved)

    def scored(self, *, rewards_N: Tensor, valid_N: Tensor, reward_parts_NK: Tensor | None = None) -> Experience:
        """Rewards arrive. A sample that could not be scored is invalid: its tokens carry no loss."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["mask_NT"] = self.mask_NT & valid_N[:, None]
        return Experience(
            **fields,
            rewards_N=rewards_N,
            valid_N=valid_N,
            reward_parts_NK=rewards_N[:, None] if reward_parts_NK is None else reward_parts_NK,
            signal_N=valid_N,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Experience(Rollouts):
    """Rollouts with rewards and, once evaluated, what the models think of them."""

    rewards_N: Tensor
    valid_N: Tensor
    """[N] False where no reward could be had."""
    reward_parts_NK: Tensor
    """[N, K] what each reward function gave, before its weight."""
    signal_N: Tensor
    """[N] False where the algorithm knows the sample cannot change the weights: no model pass is spent on it."""
    baseline_G: Tensor | None = None
    """[G] reward of one greedy answer to each prompt, where the algorithm compares with it."""
    old_logprobs_NT: Tensor | None = None
    """None: strictly on-policy, the update's own log-probs are the old ones."""
    ref_logprobs_NT: Tensor | None = None
    values_NT: Tensor | None = None
    correction_NT: Tensor | None = None
    """[N, T] importance weight of each token's policy loss, where the engine's log-probs are not the trainer's."""

    def evaluated(
        self, *, old_logprobs: Tensor | None, ref_logprobs: Tensor | None, values: Tensor | None
    ) -> Experience:
        return dataclasses.replace(self, old_logprobs_NT=old_logprobs, ref_logprobs_NT=ref_logprobs, values_NT=values)

    def corrected(self, *, mask_NT: Tensor, correction_NT: Tensor | None) -> Experience:
        """Rollout correction arrives: weights of the tokens that stay, and which do."""
        return dataclasses.replace(self, mask_NT=mask_NT, correction_NT=correction_NT)

    def compared(self, baseline_G: Tensor) -> Experience:
        """The rewards of one greedy answer to each prompt arrive."""
        return dataclasses.replace(self, baseline_G=baseline_G)

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
    value_weights_NT: Tensor | None = None
    """The same for the critic's loss."""
    selected_NT: Tensor | None = None
    """[N, T] tokens a loss singled out by statistics of the whole mini-batch."""

    def selecting(self, selected_NT: Tensor) -> TrainBatch:
        return dataclasses.replace(self, selected_NT=selected_NT)

    def weighted(self, weights_NT: Tensor, value_weights_NT: Tensor | None = None) -> TrainBatch:
        return dataclasses.replace(self, weights_NT=weights_NT, value_weights_NT=value_weights_NT)


def concatenate(parts: Sequence[Experience]) -> Experience:
    """Several collections as one, before any model has evaluated them; responses are padded to the longest of all."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.mask_NT.shape[1] for part in parts)
    starts = [sum(len(part.prompts) for part in parts[:i]) for i in range(len(parts))]

    def widened(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))

    joined: dict[str, Any] = {}
    for field in dataclasses.fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        if values[0] is None:
            continue
        if field.name == "group_N":
            values = [value + start for value, start in zip(values, starts, strict=True)]
        elif field.name.endswith("_NT"):
            values = [widened(value) for value in values]
        joined[field.name] = torch.cat(values) if isinstance(values[0], Tensor) else sum(values, ())
    return dataclasses.replace(parts[0], **joined)


def pad_rows(rows: Sequence[Sequence[float]], *, width: int, dtype: torch.dtype) -> Tensor:
    """[N, width] tensor from ragged rows, zeros to the right."""
    padded = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return padded
