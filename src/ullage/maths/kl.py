"""Per-token estimators of KL(policy || reference) from log-probs of sampled tokens (joschu.net/blog/kl-approx.html)."""

import torch
from torch import Tensor


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


ESTIMATORS = {"kl": k1, "k1": k1, "abs": absolute, "mse": k2, "k2": k2, "low_var_kl": k3, "k3": k3}
"""verl's names beside the usual ones."""
