"""Cases at the edge, for every advantage and every loss: no NaN, and the value the docstrings promise.

A group of one, equal rewards, an empty response, no token at all, a tool span in the middle.
"""

import pytest
import torch
from test_loss_splits import LOSSES

from ullage.maths import advantages, advantages_token, correction, covariance
from ullage.maths.masked import whitened

ONE = 1 / (1 + 1e-6)


def spread(advantage_N, mask):
    return advantage_N[:, None] * mask


def gae(rewards, group, valid, mask):
    values = torch.full(mask.shape, 0.5, dtype=torch.float64)
    return advantages_token.gae(advantages_token.at_last_token(rewards, mask), values, mask, gamma=1.0, lam=1.0)[0]


def with_token_rewards(estimate):
    return lambda r, g, v, m: estimate(advantages_token.at_last_token(r, m), m)


ESTIMATORS = {
    "gae": gae,
    "gae whitened": lambda r, g, v, m: whitened(gae(r, g, v, m), m),
    "grpo": lambda r, g, v, m: spread(advantages.group_relative(r, g, v), m),
    "dr grpo": lambda r, g, v, m: spread(advantages.group_relative(r, g, v, divide_by_std=False), m),
    "rloo": lambda r, g, v, m: spread(advantages.rloo(r, g, v), m),
    "opo": lambda r, g, v, m: spread(advantages.opo(r, g, v, m), m),
    "gpg": lambda r, g, v, m: spread(advantages.gpg(r, g, v), m),
    "grpo_passk": lambda r, g, v, m: spread(advantages.grpo_passk(r, g, v), m),
    "reinforce_plus_plus": with_token_rewards(lambda r, m: advantages_token.reinforce_plus_plus(r, m, gamma=0.5)[0]),
    "reinforce_plus_plus_baseline": advantages_token.reinforce_plus_plus_baseline,
    "remax": with_token_rewards(lambda r, m: advantages_token.remax(r, torch.full((len(r),), 0.5), m)[0]),
    "gdpo": lambda r, g, v, m: advantages_token.gdpo(torch.stack([r, 2 * r], 1), [1.0, 1.0], g, v, m),
}


def estimate(name, rewards, groups, mask):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    mask = torch.tensor(mask, dtype=torch.bool)
    got = ESTIMATORS[name](rewards, torch.tensor(groups), torch.ones(len(rewards), dtype=torch.bool), mask)
    assert got.isfinite().all()
    assert got.shape == mask.shape
    assert bool((got[~mask] == 0).all())
    return got


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("gae", 1.5), ("grpo", 2 * ONE), ("dr grpo", 2.0), ("rloo", 2.0), ("opo", 2.0), ("gpg", 2.0),
        ("grpo_passk", 0.0), ("remax", 1.5),
        # Whitened: one token has no deviation.
        ("gae whitened", 0.0), ("reinforce_plus_plus", 0.0), ("reinforce_plus_plus_baseline", 0.0), ("gdpo", 0.0),
    ],
)  # fmt: skip
def test_a_group_of_one(name, want):
    assert estimate(name, [2.0], [0], [[1]]).tolist() == [[pytest.approx(want, rel=1e-15)]]


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("gae", 0.25), ("grpo", 0.0), ("dr grpo", 0.0), ("rloo", 0.0), ("opo", 0.0), ("gpg", 0.0), ("grpo_passk", 0.0),
        ("remax", 0.25), ("reinforce_plus_plus_baseline", 0.0), ("gdpo", 0.0),
        # Whitened without a baseline: value * 1e-4 / 3 tokens.
        ("gae whitened", 0.25e-4 / 3), ("reinforce_plus_plus", 0.75e-4 / 3),
    ],
)  # fmt: skip
def test_equal_rewards(name, want):
    got = estimate(name, [0.75] * 3, [0] * 3, [[1], [1], [1]])
    assert got.flatten().tolist() == pytest.approx([want] * 3, rel=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_empty_response_changes_nothing_but_baselines(name):
    with_empty = estimate(name, [1.0, 0.0, 0.5], [0, 0, 1], [[1, 1], [1, 0], [0, 0]])
    without = estimate(name, [1.0, 0.0], [0, 0], [[1, 1], [1, 0]])
    factor = 3 / 2 * 1 / 2 if name == "gpg" else 1.0  # it counts the sample, and its reward: 3 / 2 instead of 2 / 1
    torch.testing.assert_close(with_empty[:2], without * factor, rtol=1e-14, atol=1e-15)
    assert with_empty[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("width", [0, 2])
def test_no_token_at_all(name, width):
    assert not estimate(name, [1.0, 0.0], [0, 0], [[0] * width] * 2).any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_tool_span_is_as_if_it_were_not_there(name):
    gap = estimate(name, [1.0, 0.25], [0, 0], [[1, 0, 0, 1, 1], [1, 1, 0, 0, 0]])
    plain = estimate(name, [1.0, 0.25], [0, 0], [[1, 1, 1], [1, 1, 0]])
    torch.testing.assert_close(gap[0, [0, 3, 4]], plain[0], rtol=0, atol=0)
    torch.testing.assert_close(gap[1, :2], plain[1, :2], rtol=0, atol=0)


def loss_and_gradient(name, mask, padding):
    """Weighted loss with given numbers on masked tokens."""
    mask = torch.tensor(mask, dtype=torch.bool)
    generator = torch.Generator().manual_seed(3)
    x, old, advantage = torch.randn(3, *mask.shape, dtype=torch.float64, generator=generator).masked_fill(
        ~mask, padding
    )
    x.requires_grad_()
    chosen = torch.zeros_like(mask)
    losses = LOSSES[name](x, old, advantage, mask, chosen, chosen, mask.double())
    loss = (losses * mask).sum()
    (gradient,) = torch.autograd.grad(loss, [x])
    assert loss.isfinite()
    assert gradient.isfinite().all()
    return loss, gradient


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mask", [[[0, 0]], [[]], [[1, 1, 1], [0, 0, 0]], [[1, 0, 1]]])
def test_losses_do_not_see_masked_tokens(name, mask):
    loss, gradient = loss_and_gradient(name, mask, padding=0.0)
    other_loss, other_gradient = loss_and_gradient(name, mask, padding=-3.0)
    assert torch.equal(loss, other_loss)
    assert torch.equal(gradient, other_gradient)
    if not torch.tensor(mask).any():
        assert loss.item() == 0.0
        assert not gradient.any()


def test_no_samples_at_all():
    none, groups, mask = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.long), torch.zeros(0, 3).bool()
    for estimator in ESTIMATORS.values():
        assert estimator(none, groups, groups.bool(), mask).shape == (0, 3)
    logprobs = torch.zeros(0, 3)
    assert not covariance.kl_cov_select(logprobs, logprobs, mask, groups, fraction=0.5).any()
    weights = correction.importance_weights(logprobs, logprobs, mask, level="sequence", high=2.0)
    assert correction.normalised(weights, mask, level="sequence").shape == (0, 3)
