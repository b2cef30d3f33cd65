"""What a rollout engine is asked for and what it returns, whatever engine it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 is greedy; its log-probs are those of temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One prompt and the seeds of the samples wanted for it."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One finished completion."""

    group: int
    index: int
    """Which seed of the group."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    """`stop` (an end token, included) or `length`."""
