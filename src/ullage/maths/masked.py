"""Means, variances and whitening over masked tokens, of one rank or of all."""

from typing import NamedTuple

import torch
from torch import Tensor

from ullage.base.communicator import Communicator, Solo

ALONE = Solo()
"""Statistics of this rank only."""

EPSILON = 1e-8
"""Added to counts and variances before a division; part of the numbers that verl's users compare."""


class Statistics(NamedTuple):
    """Of the tokens under a mask, over all ranks."""

    tokens: float
    mean: float
    variance: float
    """With n - 1; 0 for fewer than two tokens."""


def row_mean(x_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """[N] mean of each sequence's tokens; 0 for a sequence without any."""
    total_N = torch.where(mask_NT.bool(), x_NT, 0.0).sum(-1)
    return total_N / (mask_NT.sum(-1).to(x_NT.dtype) + EPSILON)


def whitening_moments(x_NT: Tensor, mask_NT: Tensor, shift: float = 0.0) -> tuple[float, float, float]:
    """(count, sum, sum of squares) of x - shift under the mask, accumulated in float64.

    Squares are accurate when `shift` is near the mean: sum over ranks once for the mean, then again around it.
    """
    shifted = x_NT[mask_NT.bool()].double() - shift
    return float(shifted.numel()), float(shifted.sum()), float(shifted.square().sum())


def statistics(x_NT: Tensor, mask_NT: Tensor, ranks: Communicator = ALONE) -> Statistics:
    """Number, mean and variance in two passes, each summed over ranks."""
    count, total, _ = ranks.sum(whitening_moments(x_NT, mask_NT))
    if count < 2:
        return Statistics(count, total, 0.0)
    mean = total / (count + EPSILON)
    _, _, squares = ranks.sum(whitening_moments(x_NT, mask_NT, mean))
    return Statistics(count, mean, squares / (count + EPSILON) * count / (count - 1))


def whiten(x_NT: Tensor, mask_NT: Tensor, mean: float, variance: float) -> Tensor:
    """Mean 0 and variance 1 by the statistics given."""
    return torch.where(mask_NT.bool(), (x_NT - mean) / (variance + EPSILON) ** 0.5, 0.0)


def whitened(x_NT: Tensor, mask_NT: Tensor, ranks: Communicator = ALONE) -> Tensor:
    """Whitened by the statistics of all ranks' tokens.

    One token alone gives 0. Equal tokens give x * 1e-4 / count: the mean's epsilon over the variance's.
    """
    _, mean, variance = statistics(x_NT, mask_NT, ranks)
    return whiten(x_NT, mask_NT, mean, variance)
