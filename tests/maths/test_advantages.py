"""Group-relative advantages by hand."""

import math

import pytest
import torch

from ullage.maths.advantages import group_has_signal, group_relative


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
