"""Advantages per token: those that discount over time, use values, or are whitened over the batch's tokens.

The mask skips what the policy did not sample: credit crosses a tool's output as if it were not there. Numbers are 0
where the mask is 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.maths.advantages import group_relative
from ullage.maths.masked import ALONE, whitened


def at_last_token(rewards_N: Tensor, mask_NT: Tensor) -> Tensor:
    """[N, T] a response's reward on its last sampled token.

    One without such a token, because it is empty or was left out of the loss, has it on its first place: nothing there
    is trained, and the statistics of its group still count it.
    """
    mask = mask_NT.bool()
    nowhere_N = ~mask.any(-1) & ~rewards_N.isnan()  # NaN: it has none
    mask = torch.cat([mask[:, :1] | nowhere_N[:, None], mask[:, 1:]], -1)
    tokens_left_NT = mask.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask & (tokens_left_NT == 1), rewards_N[:, None], 0.0)


def gae(rewards_NT: Tensor, values_NT: Tensor, mask_NT: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438 eq. 16): (advantages, returns), before any whitening.

    A_t = d_t + gamma lam A_next and d_t = r_t + gamma V_next - V_t, where `next` is the next sampled token and both
    are 0 after the last. Returns are A + V.
    """
    mask = mask_NT.bool()
    advantages_NT = torch.zeros_like(values_NT)
    next_value_N = values_NT.new_zeros(len(values_NT))
    next_advantage_N = values_NT.new_zeros(len(values_NT))
    for t in reversed(range(values_NT.shape[1])):
        delta_N = rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        advantage_N = delta_N + gamma * lam * next_advantage_N
        next_value_N = torch.where(mask[:, t], values_NT[:, t], next_value_N)
        next_advantage_N = torch.where(mask[:, t], advantage_N, next_advantage_N)
        advantages_NT[:, t] = next_advantage_N
    return torch.where(mask, advantages_NT, 0.0), torch.where(mask, advantages_NT + values_NT, 0.0)


def reinforce_plus_plus(
    rewards_NT: Tensor, mask_NT: Tensor, *, gamma: float, ranks: Communicator = ALONE
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv:2501.03262): (whitened returns, returns) with G_t = r_t + gamma G_next."""
    returns_NT, _ = gae(rewards_NT, torch.zeros_like(rewards_NT), mask_NT, gamma=gamma, lam=1.0)
    return whitened(returns_NT, mask_NT, ranks), returns_NT


def reinforce_plus_plus_baseline(
    rewards_N: Tensor, group_N: Tensor, valid_N: Tensor, mask_NT: Tensor, *, ranks: Communicator = ALONE
) -> Tensor:
    """REINFORCE++-baseline (arXiv:2501.03262): reward minus the group's mean, whitened over the batch's tokens.

    A group of one has baseline 0.
    """
    centred_N = group_relative(rewards_N, group_N, valid_N, divide_by_std=False)
    return whitened(centred_N[:, None].expand(mask_NT.shape), mask_NT.bool() & valid_N[:, None], ranks)


def remax(rewards_NT: Tensor, baseline_N: Tensor, mask_NT: Tensor) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv:2310.10505): (returns minus the reward of one greedy response to the same prompt, returns)."""
    mask = mask_NT.bool()
    returns_NT = torch.where(mask, rewards_NT, 0.0).flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask, returns_NT - baseline_N[:, None], 0.0), torch.where(mask, returns_NT, 0.0)


def gdpo(
    rewards_NK: Tensor,
    weights_K: Sequence[float],
    group_N: Tensor,
    valid_N: Tensor,
    mask_NT: Tensor,
    *,
    divide_by_std: bool = True,
    ranks: Communicator = ALONE,
) -> Tensor:
    """GDPO (arXiv:2601.05242): GRPO of each reward by itself, summed by weight, whitened over the batch's tokens.

    A reward of large scale then cannot drown the others.
    """
    advantage_N = torch.zeros_like(rewards_NK[:, 0])
    for rewards_N, weight in zip(rewards_NK.unbind(1), weights_K, strict=True):
        advantage_N = advantage_N + weight * group_relative(rewards_N, group_N, valid_N, divide_by_std=divide_by_std)
    return whitened(advantage_N[:, None].expand(mask_NT.shape), mask_NT.bool() & valid_N[:, None], ranks)
