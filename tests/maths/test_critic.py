"""Value loss and explained variance by hand."""

import math

import pytest
import torch

from ullage.maths.critic import explained_variance, value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped", "gradient"),
    [
        (1.25, 1.0, 2.0, 0.28125, False, -0.75),  # within the clip
        (2.0, 1.0, 2.0, 0.125, True, 0.0),  # moved by 1, only 0.5 counts, error 0.5
        (2.0, 1.0, 0.0, 2.0, False, 2.0),  # moved away from the target: the whole error counts
        (0.0, 1.0, 0.0, 0.125, True, 0.0),
        (0.0, 1.0, 3.0, 4.5, False, -3.0),
    ],
)
def test_value_loss(value, old, target, loss, clipped, gradient):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    got, active = value_loss(values, torch.tensor([[old]]), torch.tensor([[target]]), clip=0.5)
    got.sum().backward()
    assert (got.item(), active.item(), values.grad.item()) == (loss, clipped, gradient)


def test_explained_variance_by_hand():
    returns = torch.tensor([[1.0, 3.0, math.nan], [5.0, 0.0, 0.0]], dtype=torch.float64)
    values = torch.tensor([[2.0, 3.0, 0.0], [4.0, 9.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    # Variance of 1, 3, 5 is 4; of the errors -1, 0, 1 it is 1.
    assert explained_variance(values, returns, mask) == pytest.approx(1 - 1 / (4 + 1e-5), abs=1e-7)
    assert explained_variance(returns, returns, mask) == pytest.approx(1.0, abs=1e-7)
    assert explained_variance(returns * 0 + 7, returns, mask) == pytest.approx(1 - 4 / (4 + 1e-5), abs=1e-7)


@pytest.mark.parametrize("mask", [[[0, 0]], [[1, 0]]])
def test_explained_variance_of_too_few_tokens(mask):
    assert explained_variance(torch.ones(1, 2), torch.zeros(1, 2), torch.tensor(mask)) == 0.0
