"""The clipped surrogate by hand, each branch with its gradient."""

import math

import pytest
import torch

from ullage.maths.losses import clipped_surrogate


def surrogate(ratio, advantage, clip_low=0.2, clip_high=0.3, dual_clip=3.0):
    """(loss, clipped, d loss / d logprob) of one token."""
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    loss, clipped = clipped_surrogate(
        logprob,
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    loss.sum().backward()
    return loss.item(), clipped.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "gradient"),
    [
        (1.0, 2.0, -2.0, False, -2.0),
        (1.2, 2.0, -2.4, False, -2.4),
        (1.5, 2.0, -2.6, True, 0.0),  # above 1 + 0.3 with a positive advantage
        (0.5, 2.0, -1.0, False, -1.0),  # below 1 - 0.2, but pulling back in
        (0.5, -2.0, 1.6, True, 0.0),  # below 1 - 0.2 with a negative advantage
        (1.5, -2.0, 3.0, False, 3.0),  # above, but pulling back in
        (4.0, -2.0, 6.0, False, 0.0),  # dual clip: bounded by 3 * 2
        (1.5, 0.0, 0.0, False, 0.0),
    ],
)
def test_branches(ratio, advantage, loss, clipped, gradient):
    got = surrogate(ratio, advantage)
    assert got[0] == pytest.approx(loss, abs=1e-12)
    assert got[1] is clipped
    assert got[2] == pytest.approx(gradient, abs=1e-12)


def test_absurd_ratios_stay_finite():
    assert surrogate(math.exp(600), 1.0, clip_high=0.2)[0] == pytest.approx(-1.2)
    loss, _, gradient = surrogate(math.exp(600), -1.0)
    assert (loss, gradient) == (3.0, 0.0)
    assert surrogate(math.exp(600), -1.0, dual_clip=1e30)[0] == pytest.approx(math.exp(20))
