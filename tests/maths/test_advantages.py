"""Advantages of whole responses by hand."""

import math

import pytest
import torch
from two_ranks import on_two_ranks

from ullage.maths.advantages import gpg, group_has_signal, group_relative, grpo_passk, opo, rloo


def advantages(rewards, groups, valid=None, **options):
    valid = [True] * len(rewards) if valid is None else valid
    return group_relative(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.long),
        torch.tensor(valid, dtype=torch.bool),
        **options,
    ).tolist()


def signal(rewards, groups, valid=None):
    valid = [True] * len(rewards) if valid is None else valid
    return group_has_signal(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups, dtype=torch.long),
        torch.tensor(valid, dtype=torch.bool),
    ).tolist()


def test_by_hand():
    # Group 0: mean 2/3, deviation sqrt((1/9 + 4/9 + 1/9) / 2) = sqrt(1/3). Group 1: mean 3, deviation sqrt(2).
    third, half = math.sqrt(1 / 3) + 1e-6, math.sqrt(2) + 1e-6
    want = [1 / 3 / third, -2 / 3 / third, -1 / half, 1 / 3 / third, 1 / half]
    assert advantages([1.0, 0.0, 2.0, 1.0, 4.0], [0, 0, 1, 0, 1]) == pytest.approx(want, rel=1e-12)


def test_without_the_deviation():
    want = [1 / 3, -2 / 3, 1 / 3]
    assert advantages([1.0, 0.0, 1.0], [0, 0, 0], divide_by_std=False) == pytest.approx(want, rel=1e-12)


def test_a_group_of_one_has_no_baseline():
    assert advantages([0.5, 1.0, 0.0], [0, 1, 1])[0] == pytest.approx(0.5 / (1 + 1e-6), rel=1e-12)
    assert advantages([0.5], [0], divide_by_std=False) == [0.5]


def test_equal_rewards_give_nothing():
    assert advantages([0.75] * 4, [0] * 4) == [0.0] * 4


def test_invalid_samples_take_no_part():
    with_invalid = advantages([1.0, 99.0, 0.0, math.nan], [0, 0, 0, 0], [True, False, True, False])
    alone = advantages([1.0, 0.0], [0, 0])
    assert with_invalid == [alone[0], 0.0, alone[1], 0.0]


def test_a_group_without_valid_samples():
    assert advantages([3.0, 4.0, 1.0, 0.0], [0, 0, 1, 1], [False, False, True, True])[:2] == [0.0, 0.0]


def test_a_group_with_one_valid_sample_counts_as_a_group_of_one():
    assert advantages([2.0, 4.0], [0, 0], [False, True]) == [0.0, pytest.approx(4 / (1 + 1e-6), rel=1e-12)]


def test_nothing():
    assert advantages([], []) == []
    assert signal([], []) == []


def test_a_group_number_without_samples():
    assert advantages([1.0, 0.0], [2, 2], divide_by_std=False) == [0.5, -0.5]


@pytest.mark.parametrize(
    ("rewards", "groups", "valid", "want"),
    [
        ([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], None, [False, False, True, True]),
        ([1.0, 0.0, 1.0], [0, 0, 0], [True, False, True], [False, False, False]),
        ([1.0, 0.0, math.nan], [0, 0, 0], [True, True, False], [True, True, False]),
        ([0.5, 0.0], [0, 1], None, [True, False]),
        ([0.5, 7.0], [0, 0], [True, False], [True, False]),
        ([3.0, 4.0], [0, 0], [False, False], [False, False]),
    ],
)
def test_signal_is_where_an_advantage_is(rewards, groups, valid, want):
    assert signal(rewards, groups, valid) == want
    assert [value != 0 for value in advantages(rewards, groups, valid)] == want


def tensors(rewards, groups, valid=None):
    valid = [True] * len(rewards) if valid is None else valid
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(valid, dtype=torch.bool)


def test_leave_one_out_by_hand():
    # The others' means: (0 + 2) / 2, (1 + 2) / 2, (1 + 0) / 2; the last is alone.
    assert rloo(*tensors([1.0, 0.0, 2.0, 0.5], [0, 0, 0, 1])).tolist() == pytest.approx(
        [0.0, -1.5, 1.5, 0.5], abs=1e-15
    )


def test_length_weighted_baseline_by_hand():
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    assert opo(*tensors([1.0, 0.0, 0.5], [0, 0, 1]), mask).tolist() == [0.75, -0.25, 0.5]


def test_length_weighted_baseline_ignores_invalid_samples():
    mask = torch.ones(3, 4)
    assert opo(*tensors([1.0, 0.0, math.nan], [0, 0, 0], [True, True, False]), mask).tolist() == [0.5, -0.5, 0.0]


def test_length_weighted_baseline_of_empty_responses_is_zero():
    assert opo(*tensors([1.0, 2.0], [0, 0]), torch.zeros(2, 3)).tolist() == [1.0, 2.0]


def test_policy_gradient_factor_by_hand():
    # Three of four rewards are not 0: factor 4/3.
    want = [4 / 9, -8 / 9, 4 / 9, 2 / 3]
    assert gpg(*tensors([1.0, 0.0, 1.0, 0.5], [0, 0, 0, 1])).tolist() == pytest.approx(want, rel=1e-14)


def test_policy_gradient_factor_without_any_reward():
    assert gpg(*tensors([0.0, 0.0], [0, 0])).tolist() == [0.0, 0.0]


def test_policy_gradient_factor_counts_valid_samples_of_all_ranks():
    rewards, groups, valid = tensors(
        [1.0, 0.0, 9.0, 2.0, 4.0, 0.0], [0, 0, 0, 1, 1, 2], [True, True, False, True, True, True]
    )
    cut = [slice(0, 3), slice(3, 6)]
    parts = on_two_ranks(
        lambda ranks: gpg(rewards[cut[ranks.rank]], groups[cut[ranks.rank]], valid[cut[ranks.rank]], ranks=ranks)
    )
    assert torch.cat(parts).tolist() == pytest.approx([5 / 6, -5 / 6, 0, -5 / 3, 5 / 3, 0], rel=1e-14)
    assert torch.cat(parts).tolist() == gpg(rewards, groups, valid).tolist()


@pytest.mark.parametrize(
    ("rewards", "valid", "lead"),
    [
        ([3.0, 1.0, 2.0], None, [1.0, 0.0, 0.0]),
        ([-3.0, -1.0, -2.0], None, [0.0, 1.0, 0.0]),
        ([2.0, 2.0, 0.0], None, [0.0, 0.0, 0.0]),  # nobody leads
        ([9.0, 1.0, 0.0], [False, True, True], [0.0, 1.0, 0.0]),
        ([math.nan, 1.0, 0.5], [False, True, True], [0.0, 0.5, 0.0]),
        ([9.0, 1.0, 0.0], [False, True, False], [0.0, 0.0, 0.0]),  # one valid member: no second
        ([9.0, 1.0, 0.0], [False, False, False], [0.0, 0.0, 0.0]),
    ],
)
def test_the_lead_of_the_best(rewards, valid, lead):
    assert grpo_passk(*tensors(rewards, [0, 0, 0], valid), divide_by_std=False).tolist() == lead


def test_the_lead_over_the_deviation():
    got = grpo_passk(*tensors([3.0, 1.0, 2.0, 5.0, 1.0], [0, 0, 0, 1, 1]))
    assert got.tolist() == pytest.approx([1 / (1 + 1e-6), 0, 0, 4 / (math.sqrt(8) + 1e-6), 0], rel=1e-14)


def test_samples_of_no_group():
    empty = tensors([], [], [])
    nothing = (empty[0], empty[1].long(), empty[2])
    assert [f(*nothing).tolist() for f in (rloo, gpg, grpo_passk)] == [[], [], []]
    assert opo(*nothing, torch.zeros(0, 3)).tolist() == []
