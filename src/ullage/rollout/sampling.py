"""What a rollout engine is asked for and what it returns, whatever engine it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 is greedy; its log-probs are those of temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    ignore_eos: bool = False
    keep_supports: bool = False
    """Say for every token which ids top-p and top-k left to draw from: a trainer needs them."""

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One prompt and the seeds of the samples wanted for it."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    max_tokens: int | None = None
    """Where it is not the sampling's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One finished completion."""

    group: int
    index: int
    """Which seed of the group."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    """`stop` (an end token, included) or `length`; `turns` for an episode with as many as it may have."""
    mask: tuple[bool, ...] | None = None
    """False on tokens that an environment put between the sampled ones; None: all were sampled."""
    supports: tuple[Tensor, ...] | None = None
    """For each token the ids it was drawn from, where they were asked for and not all."""

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) if self.mask is None else sum(self.mask)
