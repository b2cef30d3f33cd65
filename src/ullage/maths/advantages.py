"""Advantage estimators: from rewards to how much better than expected each sample was."""

import torch
from torch import Tensor


def group_relative(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """GRPO (arXiv:2402.03300): reward minus the group's mean, over the group's standard deviation (n-1, plus 1e-6).

    Without the division this is Dr. GRPO (arXiv:2503.20783). A group with one valid member has no baseline: its mean
    counts as 0 and its deviation as 1. Invalid samples take no part and get 0.
    """
    num_groups = int(group_N.max()) + 1 if len(group_N) else 0
    valid = valid_N.to(rewards_N.dtype)
    rewards = torch.where(valid_N, rewards_N, 0.0)
    count_G = rewards.new_zeros(num_groups).index_add_(0, group_N, valid)
    mean_G = rewards.new_zeros(num_groups).index_add_(0, group_N, rewards) / count_G.clamp(min=1)
    mean_G = torch.where(count_G > 1, mean_G, 0.0)
    centred_N = (rewards - mean_G[group_N]) * valid
    if not divide_by_std:
        return centred_N
    variance_G = rewards.new_zeros(num_groups).index_add_(0, group_N, centred_N**2) / (count_G - 1).clamp(min=1)
    std_G = torch.where(count_G > 1, variance_G.sqrt(), 1.0)
    return centred_N / (std_G[group_N] + 1e-6)


def group_has_signal(rewards_N: Tensor, group_N: Tensor, valid_N: Tensor) -> Tensor:
    """True where a valid sample gets an advantage: its group holds two different rewards, or it is alone there."""
    num_groups = int(group_N.max()) + 1 if len(group_N) else 0
    low = torch.where(valid_N, rewards_N, torch.inf)
    high = torch.where(valid_N, rewards_N, -torch.inf)
    low_G = low.new_full((num_groups,), torch.inf).scatter_reduce_(0, group_N, low, "amin")
    high_G = high.new_full((num_groups,), -torch.inf).scatter_reduce_(0, group_N, high, "amax")
    count_G = torch.zeros(num_groups, dtype=torch.long, device=group_N.device).index_add_(0, group_N, valid_N.long())
    alone_N = (count_G == 1)[group_N] & (rewards_N != 0)  # its mean counts as 0, see `group_relative`
    return valid_N & ((high_G > low_G)[group_N] | alone_N)
