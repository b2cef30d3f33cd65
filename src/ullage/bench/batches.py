"""Batches for benchmarks: sequences of log-normal length with random tokens, credited and weighted as in a run."""

from __future__ import annotations

import torch

from ullage.algorithms import Algorithm
from ullage.base.communicator import Solo
from ullage.batch.stages import Rollouts, TrainBatch, pad_rows
from ullage.config.tree import Config
from ullage.trainer.schedule import Schedule

PROMPT = 16
"""Tokens before each response, which carry no loss."""


def log_normal_lengths(tokens: int, *, mean: int, cap: int, seed: int, sigma: float = 0.6) -> list[int]:
    """Lengths of whole sequences, as many as the tokens hold."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while True:
        draw = torch.randn((), generator=generator).mul(sigma).sub(sigma * sigma / 2).exp().item()
        length = max(PROMPT + 1, min(cap, round(mean * draw)))
        if sum(lengths) + length > tokens:
            return lengths
        lengths.append(length)


def random_batch(lengths: list[int], config: Config, algorithm: Algorithm, *, seed: int) -> TrainBatch:
    """One mini-batch of a step: every sequence answers a prompt of its own, half of them well."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [length - PROMPT for length in lengths]

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(10, 500, (count,), generator=generator).tolist())

    number = torch.arange(len(lengths))
    rollouts = Rollouts(
        prompts=tuple(tokens(PROMPT) for _ in lengths),
        order_G=number,
        group_N=number,
        sample_N=number,
        responses=tuple(tokens(size) for size in sizes),
        mask_NT=pad_rows([[1.0] * size for size in sizes], width=max(sizes), dtype=torch.bool),
        rollout_logprobs_NT=None,
        finish_reasons=("length",) * len(lengths),
    )
    valid = torch.ones(len(lengths), dtype=torch.bool)
    experience = rollouts.scored(rewards_N=(number % 2).double(), valid_N=valid)
    (batch,) = Schedule(config, algorithm.aggregation, Solo()).mini_batches(
        algorithm.assign_credit(experience, Solo()), step=1
    )
    return batch
