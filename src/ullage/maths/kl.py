"""Per-token estimators of KL(policy || reference) from log-probs of sampled tokens (joschu.net/blog/kl-approx.html)."""

from collections.abc import Callable

import torch
from torch import Tensor

Estimator = Callable[[Tensor, Tensor], Tensor]

MAX_PROPORTIONAL_ERROR = 0.2


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, can be negative."""
    return logprobs - ref_logprobs


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return (logprobs - ref_logprobs).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared difference: biased, and the one whose gradient is the gradient of the KL."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, never negative, low variance; clamped as in verl."""
    difference = (ref_logprobs - logprobs).clamp(-20, 20)
    return (torch.exp(difference) - difference - 1).clamp(-10, 10)


def straight_through(estimator: Estimator) -> Estimator:
    """The value of an estimator with the gradient of k2 (names ending in `+`)."""

    def estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        carrier = k2(logprobs, ref_logprobs)
        return estimator(logprobs, ref_logprobs).detach() + (carrier - carrier.detach())

    return estimate


_BASES: dict[str, Estimator] = {
    "kl": k1, "k1": k1, "abs": absolute, "mse": k2, "k2": k2, "low_var_kl": k3, "k3": k3,
}  # fmt: skip

ESTIMATORS = _BASES | {f"{name}+": straight_through(base) for name, base in _BASES.items()}
"""verl's names beside the usual ones."""


def penalised_rewards(rewards_NT: Tensor, kl_NT: Tensor, mask_NT: Tensor, coefficient: float) -> Tensor:
    """KL in the reward (arXiv:1909.08593 eq. 2): token rewards minus coefficient times the token's KL."""
    return rewards_NT - coefficient * torch.where(mask_NT.bool(), kl_NT, 0.0)


def new_coefficient(coefficient: float, kl: float, target: float, horizon: float, batch_size: int) -> float:
    """The adaptive controller (arXiv:1909.08593 §2.2): drifts towards the coefficient that holds the KL at its target.

    Args:
        kl: mean over sequences of their mean KL per token.
        horizon: samples over which a relative error of 1 % changes the coefficient by about 1 %.
    """
    error = min(max(kl / target - 1, -MAX_PROPORTIONAL_ERROR), MAX_PROPORTIONAL_ERROR)
    return coefficient * (1 + error * batch_size / horizon)
