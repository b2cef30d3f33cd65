"""Advantages of whole responses: from one reward per sample to how much better than expected the sample was.

All compare within groups of samples of one prompt, and a group never leaves its rank. Invalid samples take no part and
get 0. Broadcast over the response's mask, the advantage is also the return.
"""

import torch
from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.maths.masked import ALONE

STD_EPSILON = 1e-6


def group_relative(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """GRPO (arXiv:2402.03300): reward minus the group's mean, over the group's standard deviation (n-1, plus 1e-6).

    Without the division this is Dr. GRPO (arXiv:2503.20783). A group with one valid member has no baseline: its mean
    counts as 0 and its deviation as 1.
    """
    centred_N = _minus_baseline(rewards_N, group_N, valid_N, valid_N.to(rewards_N.dtype))
    if not divide_by_std:
        return centred_N
    return centred_N / (_group_std(rewards_N, group_N, valid_N)[group_N] + STD_EPSILON)


def rloo(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor) -> Tensor:
    """RLOO (arXiv:2402.14740): reward minus the mean of the group's other members = n/(n-1) (R - mean).

    A group of one has no others: its reward is the advantage.
    """
    count_G = _group_sum(valid_N.to(rewards_N.dtype), group_N)
    factor_G = torch.where(count_G > 1, count_G / (count_G - 1).clamp(min=1), 1.0)
    return group_relative(rewards_N, group_N, valid_N, divide_by_std=False) * factor_G[group_N]


def opo(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor, mask_NT: Tensor) -> Tensor:
    """OPO (arXiv:2505.23585): reward minus the group's mean weighted by length, the baseline of least variance.

    A group of one has baseline 0, and so has a group of empty responses.
    """
    return _minus_baseline(rewards_N, group_N, valid_N, mask_NT.sum(-1).to(rewards_N.dtype) * valid_N)


def gpg(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor, *, ranks: Communicator = ALONE) -> Tensor:
    """GPG (arXiv:2504.02546): reward minus the group's mean, times samples over samples with a reward other than 0.

    The factor makes up for samples that teach nothing; it counts over the whole batch.
    """
    rewarded_N = valid_N & (rewards_N != 0)
    samples, rewarded = ranks.sum([float(valid_N.sum()), float(rewarded_N.sum())])
    return group_relative(rewards_N, group_N, valid_N, divide_by_std=False) * (samples / max(rewarded, 1.0))


def grpo_passk(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """Pass@k training (arXiv:2503.19595): the best of a group gets its lead over the second, all others get 0.

    The lead is divided by the group's standard deviation (n-1, plus 1e-6). A tie for the best and a group of one have
    no lead: 0.
    """
    rewards = torch.where(valid_N, rewards_N, -torch.inf)
    best_N = _group_max(rewards, group_N)[group_N]
    is_best_N = valid_N & (rewards_N == best_N)
    second_N = _group_max(torch.where(is_best_N, -torch.inf, rewards), group_N)[group_N]
    unique_N = _group_sum(is_best_N.to(rewards_N.dtype), group_N)[group_N] == 1
    leads_N = is_best_N & unique_N & second_N.isfinite()
    lead_N = torch.where(leads_N, rewards_N - second_N, 0.0)
    if not divide_by_std:
        return lead_N
    return lead_N / (_group_std(rewards_N, group_N, valid_N)[group_N] + STD_EPSILON)


def group_has_signal(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor) -> Tensor:
    """True where a valid sample gets an advantage: its group holds two different rewards, or it is alone there."""
    low_G = -_group_max(torch.where(valid_N, -rewards_N, -torch.inf), group_N)
    high_G = _group_max(torch.where(valid_N, rewards_N, -torch.inf), group_N)
    count_G = _group_sum(valid_N.long(), group_N)
    alone_N = (count_G == 1)[group_N] & (rewards_N != 0)  # its mean counts as 0, see `group_relative`
    return valid_N & ((high_G > low_G)[group_N] | alone_N)


def _group_sum(x_N: Tensor, group_N: Tensor) -> Tensor:
    num_groups = int(group_N.max()) + 1 if len(group_N) else 0
    return x_N.new_zeros(num_groups).index_add_(0, group_N, x_N)


def _group_max(x_N: Tensor, group_N: Tensor) -> Tensor:
    num_groups = int(group_N.max()) + 1 if len(group_N) else 0
    return x_N.new_full((num_groups,), -torch.inf).scatter_reduce_(0, group_N, x_N, "amax")


def _minus_baseline(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor, weight_N: Tensor) -> Tensor:
    """Rewards minus the group's weighted mean, which counts as 0 in groups of one; 0 for invalid samples."""
    rewards = torch.where(valid_N, rewards_N, 0.0)
    weight_G = _group_sum(weight_N, group_N)
    mean_G = _group_sum(rewards * weight_N, group_N) / torch.where(weight_G > 0, weight_G, 1.0)
    baseline_G = torch.where(_group_sum(valid_N.long(), group_N) > 1, mean_G, 0.0)
    return torch.where(valid_N, rewards - baseline_G[group_N], 0.0)


def _group_std(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor) -> Tensor:
    """[G] with n - 1; 1 for fewer than two valid members."""
    count_G = _group_sum(valid_N.to(rewards_N.dtype), group_N)
    centred_N = _minus_baseline(rewards_N, group_N, valid_N, valid_N.to(rewards_N.dtype))
    variance_G = _group_sum(centred_N.square(), group_N) / (count_G - 1).clamp(min=1)
    return torch.where(count_G > 1, variance_G.sqrt(), 1.0)
