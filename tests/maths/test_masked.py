"""Whitening and its statistics by hand, far from zero, over two ranks, and of nothing."""

import math

import pytest
import torch
from two_ranks import on_two_ranks

from ullage.maths import masked

X = torch.tensor([[1.0, 7.0, 3.0], [5.0, math.nan, 100.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)


def test_row_means_leave_out_masked_tokens():
    want = [11 / (3 + 1e-8), 5 / (1 + 1e-8)]
    assert masked.row_mean(X, MASK).tolist() == pytest.approx(want, rel=1e-15)
    assert masked.row_mean(X, MASK & False).tolist() == [0.0, 0.0]


def test_moments():
    assert masked.whitening_moments(X, MASK) == (4.0, 16.0, 84.0)
    assert masked.whitening_moments(X, MASK, shift=4.0) == (4.0, 0.0, 20.0)


def test_statistics_by_hand():
    mean = 16 / (4 + 1e-8)
    tokens, got_mean, got_variance = masked.statistics(X, MASK)
    assert tokens == 4.0
    assert got_mean == pytest.approx(mean, rel=1e-15)
    assert got_variance == pytest.approx(20 / (4 + 1e-8) * 4 / 3, rel=1e-14)  # squares around 4: 9, 9, 1, 1


def test_whitened_by_hand():
    mean, variance = 16 / (4 + 1e-8), 20 / (4 + 1e-8) * 4 / 3
    want = [
        [(x - mean) / math.sqrt(variance + 1e-8) for x in (1.0, 7.0, 3.0)],
        [(5 - mean) / math.sqrt(variance + 1e-8)],
    ]
    got = masked.whitened(X, MASK)
    assert got[0].tolist() == pytest.approx(want[0], rel=1e-14)
    assert got[1].tolist() == [pytest.approx(want[1][0], rel=1e-14), 0.0, 0.0]


def test_accurate_far_from_zero():
    """A difference of mean squares would have no digit left here."""
    x = torch.tensor([[1e8, 1e8 + 1, 1e8 + 2]], dtype=torch.float64)
    # The epsilon in the mean lowers it by 1e8 * 1e-8 / 3, as it does in verl: -2/3, 1/3 and 4/3 are left.
    assert masked.statistics(x, torch.ones(1, 3)).variance == pytest.approx((4 + 1 + 16) / 9 / 2, rel=1e-7)


def test_float32_tokens_are_summed_in_float64():
    x = torch.tensor([[1000.0, 1000.25, 1000.5]] * 1000)
    assert masked.whitening_moments(x, torch.ones(1000, 3), shift=1000.25) == (3000.0, 0.0, 125.0)
    assert masked.whitening_moments(x, torch.ones(1000, 3)) == (3000.0, 3_000_750.0, 3_001_500_312.5)


def test_two_ranks_whiten_as_one():
    parts = on_two_ranks(lambda ranks: masked.whitened(X[ranks.rank, None], MASK[ranks.rank, None], ranks))
    torch.testing.assert_close(torch.cat(parts), masked.whitened(X, MASK), rtol=0, atol=1e-15)


def test_one_token_and_none():
    one = torch.tensor([[True, False, False], [False, False, False]])
    assert masked.statistics(X, one) == (1.0, 1.0, 0.0)
    assert masked.whitened(X, one).tolist() == [[0.0] * 3] * 2
    assert masked.statistics(X, one & False) == (0.0, 0.0, 0.0)
    assert masked.whitened(X, one & False).tolist() == [[0.0] * 3] * 2
    assert masked.whitened(X[:, :0], MASK[:, :0]).shape == (2, 0)


def test_equal_tokens_have_the_documented_value():
    x = torch.full((2, 2), 0.75, dtype=torch.float64)
    assert masked.whitened(x, torch.ones(2, 2)).flatten().tolist() == pytest.approx([0.75e-4 / 4] * 4, rel=1e-6)
