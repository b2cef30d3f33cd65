"""Token advantages by hand: discounting across tool spans, baselines, per-reward normalisation."""

import math

import pytest
import torch
from two_ranks import on_two_ranks

from ullage.maths import advantages_token as token
from ullage.maths.masked import whitened

TOOL_SPAN = torch.tensor([[1, 1, 0, 1, 1, 0]], dtype=torch.bool)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def test_rewards_sit_on_the_last_sampled_token():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]])
    got = token.at_last_token(tensor([1.0, 2.0, math.nan, 4.0, 5.0]), mask)
    assert got.tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0], [0, 4, 0], [5, 0, 0]]
    assert token.at_last_token(tensor([1.0]), mask[:1, :0]).shape == (1, 0)


def test_generalised_advantages_by_hand():
    # Last token: 1 - 0.25 = 0.75. First: d = 0 + 0.5 * 0.25 - 0.5 = -0.375, A = -0.375 + 0.25 * 0.75.
    advantages, returns = token.gae(
        tensor([[0.0, 7.0, 1.0, 7.0]]),
        tensor([[0.5, math.nan, 0.25, 99.0]]),
        torch.tensor([[1, 0, 1, 0]]),
        gamma=0.5,
        lam=0.5,
    )
    assert advantages.tolist() == [[-0.1875, 0.0, 0.75, 0.0]]
    assert returns.tolist() == [[0.3125, 0.0, 1.0, 0.0]]


def test_generalised_advantages_with_lambda_one_are_returns_minus_values():
    values = tensor([[0.3, -0.2, 5.0, 0.1, 0.4, 5.0]])
    advantages, returns = token.gae(
        token.at_last_token(tensor([2.0]), TOOL_SPAN), values, TOOL_SPAN, gamma=1.0, lam=1.0
    )
    assert returns[TOOL_SPAN].tolist() == pytest.approx([2.0] * 4, rel=1e-15)
    torch.testing.assert_close(advantages[TOOL_SPAN], 2.0 - values[TOOL_SPAN], rtol=0, atol=1e-15)


@pytest.mark.parametrize(("gamma", "want"), [(1.0, [1, 1, 0, 1, 1, 0]), (0.5, [0.125, 0.25, 0, 0.5, 1, 0])])
def test_returns_cross_a_tool_span(gamma, want):
    rewards = token.at_last_token(tensor([1.0]), TOOL_SPAN)
    advantages, returns = token.reinforce_plus_plus(rewards, TOOL_SPAN, gamma=gamma)
    assert returns.tolist() == [want]
    assert torch.equal(advantages, whitened(returns, TOOL_SPAN))


def test_group_baseline_then_whitening():
    # Stored value of verl for rewards 1, 0, 1 of one prompt and 0.5 of another, three tokens each.
    rewards, groups = tensor([1.0, 0.0, 1.0, 0.5]), torch.tensor([0, 0, 0, 1])
    got = token.reinforce_plus_plus_baseline(rewards, groups, torch.ones(4, dtype=torch.bool), torch.ones(4, 3))
    assert got[:, 0].tolist() == pytest.approx([0.431642, -1.640238, 0.431642, 0.776955], abs=1e-6)
    assert torch.equal(got, got[:, :1].expand(4, 3))


def test_group_baseline_leaves_out_invalid_samples():
    rewards, groups, mask = tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 1]), torch.ones(3, 2)
    with_invalid = token.reinforce_plus_plus_baseline(
        tensor([1.0, 0.0, math.nan, 0.5]),
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([True, True, False, True]),
        torch.ones(4, 2),
    )
    alone = token.reinforce_plus_plus_baseline(rewards, groups, torch.ones(3, dtype=torch.bool), mask)
    assert with_invalid[2].tolist() == [0.0, 0.0]
    assert torch.equal(with_invalid[[0, 1, 3]], alone)


def test_greedy_baseline_by_hand():
    rewards = tensor([[0.0, 50.0, 0.5, 1.0], [0.25, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 0, 0]])
    advantages, returns = token.remax(rewards, tensor([0.25, 1.0]), mask)
    assert returns.tolist() == [[1.5, 0.0, 1.5, 1.0], [0.25, 0.0, 0.0, 0.0]]
    assert advantages.tolist() == [[1.25, 0.0, 1.25, 0.75], [-0.75, 0.0, 0.0, 0.0]]


REWARDS = tensor([[1.0, 10.0], [0.0, 20.0], [0.0, 5.0], [0.0, 5.0]])
GROUPS = torch.tensor([0, 0, 1, 1])
VALID = torch.ones(4, dtype=torch.bool)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_rewards_normalised_one_by_one_by_hand(divide_by_std):
    # First group: +-0.5 (deviation sqrt(1/2)) of the first reward, -+5 (deviation sqrt(50)) of the second, weight 0.5.
    first = 0.5 / (math.sqrt(0.5) + 1e-6) if divide_by_std else 0.5
    second = 5 / (math.sqrt(50) + 1e-6) if divide_by_std else 5
    v = first - 0.5 * second
    mean = v / (4 + 1e-8)  # tokens: v, v, -v, 0
    squares = 2 * (v - mean) ** 2 + (-v - mean) ** 2 + mean**2
    deviation = math.sqrt(squares / (4 + 1e-8) * 4 / 3 + 1e-8)
    high, low, none = (v - mean) / deviation, (-v - mean) / deviation, -mean / deviation
    got = token.gdpo(REWARDS, [1.0, 0.5], GROUPS, VALID, MASK, divide_by_std=divide_by_std)
    want = [[high, high, 0], [low, 0, 0], [0, none, 0], [0, 0, 0]]
    torch.testing.assert_close(got, tensor(want), rtol=0, atol=1e-13)


def test_rewards_normalised_one_by_one_do_not_feel_scale():
    scaled = REWARDS * tensor([1.0, 1000.0])
    got = token.gdpo(scaled, [1.0, 1.0], GROUPS, VALID, MASK)
    torch.testing.assert_close(got, token.gdpo(REWARDS, [1.0, 1.0], GROUPS, VALID, MASK), rtol=0, atol=1e-2)


def test_two_ranks_give_the_advantages_of_one():
    def part(ranks):
        rows = slice(2 * ranks.rank, 2 * ranks.rank + 2)
        groups = (REWARDS[rows], GROUPS[rows], VALID[rows], MASK[rows])
        return torch.cat(
            [
                token.gdpo(groups[0], [1.0, 0.3], *groups[1:], ranks=ranks),
                token.reinforce_plus_plus_baseline(groups[0][:, 1], *groups[1:], ranks=ranks),
                token.reinforce_plus_plus(
                    token.at_last_token(groups[0][:, 0], MASK[rows]), MASK[rows], gamma=0.9, ranks=ranks
                )[0],
            ],
            dim=1,
        )

    whole = torch.cat(
        [
            token.gdpo(REWARDS, [1.0, 0.3], GROUPS, VALID, MASK),
            token.reinforce_plus_plus_baseline(REWARDS[:, 1], GROUPS, VALID, MASK),
            token.reinforce_plus_plus(token.at_last_token(REWARDS[:, 0], MASK), MASK, gamma=0.9)[0],
        ],
        dim=1,
    )
    torch.testing.assert_close(torch.cat(on_two_ranks(part)), whole, rtol=0, atol=1e-14)
