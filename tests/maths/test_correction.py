"""Importance weights and rejection by hand."""

import math

import pytest
import torch
from two_ranks import on_two_ranks

from ullage.maths import correction


def logs(values):
    return torch.tensor(values, dtype=torch.float64).log()


# Ratios 2, 1/2, 4 and 1/4, 1; masked tokens would blow everything up.
OLD = logs([[2.0, 0.5, 4.0], [0.25, 1.0, math.inf], [math.inf, math.nan, 1.0]])
ROLLOUT = torch.zeros(3, 3, dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.bool)


def weights(level, high, low=None):
    got = correction.importance_weights(OLD, ROLLOUT, MASK, level=level, high=high, low=low)
    return got.tolist()


def close(want):
    return [pytest.approx(row, rel=1e-14) for row in want]


def test_truncated_token_weights():
    assert weights("token", 2.5) == close([[2.0, 0.5, 2.5], [0.25, 1.0, 0.0], [0.0] * 3])


def test_truncated_sequence_weights():
    # Products 4 and 1/4.
    assert weights("sequence", 10.0) == close([[4.0] * 3, [0.25, 0.25, 0.0], [0.0] * 3])
    assert weights("sequence", 3.0) == close([[3.0] * 3, [0.25, 0.25, 0.0], [0.0] * 3])


def test_two_sided_weights_are_zero_outside():
    assert weights("token", 3.0, low=0.4) == close([[2.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0] * 3])
    assert weights("sequence", 5.0, low=0.5) == close([[4.0] * 3, [0.0] * 3, [0.0] * 3])


def test_weights_are_constants():
    old = torch.zeros(1, 2, requires_grad=True)
    got = correction.importance_weights(old, torch.ones(1, 2), torch.ones(1, 2), level="token", high=2.0)
    assert not got.requires_grad


def test_absurd_ratios_stay_finite():
    old, rollout = torch.tensor([[500.0, -500.0]]), torch.zeros(1, 2)
    got = correction.importance_weights(old.double(), rollout.double(), torch.ones(1, 2), level="token", high=math.inf)
    assert got.tolist() == [pytest.approx([math.exp(20), math.exp(-20)], rel=1e-14)]


def test_normalised_token_weights():
    # Mean of 2, 1/2, 4, 1/4, 1 is 1.55.
    raw = torch.tensor(weights("token", 10.0), dtype=torch.float64)
    got = correction.normalised(raw, MASK, level="token")
    torch.testing.assert_close(got, raw * (5 + 1e-8) / 7.75, rtol=1e-14, atol=0)


def test_normalised_sequence_weights():
    # Two sequences that have tokens, weights 4 and 1/4, whatever their lengths.
    raw = torch.tensor(weights("sequence", 10.0), dtype=torch.float64)
    total = 12 / (3 + 1e-8) + 0.5 / (2 + 1e-8)
    got = correction.normalised(raw, MASK, level="sequence")
    torch.testing.assert_close(got, raw * (2 + 1e-8) / total, rtol=1e-14, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_two_ranks_normalise_as_one(level):
    raw = torch.tensor(weights(level, 10.0), dtype=torch.float64)
    cut = [slice(0, 1), slice(1, 3)]
    parts = on_two_ranks(
        lambda ranks: correction.normalised(raw[cut[ranks.rank]], MASK[cut[ranks.rank]], level=level, ranks=ranks)
    )
    torch.testing.assert_close(torch.cat(parts), correction.normalised(raw, MASK, level=level), rtol=1e-15, atol=0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_vanishing_weights_are_not_normalised(level):
    assert correction.normalised(torch.zeros(3, 3), MASK, level=level).tolist() == [[0.0] * 3] * 3


def test_geometric_mean_of_a_sequence():
    raw = torch.tensor(weights("token", 10.0), dtype=torch.float64)
    got = correction.sequence_weights(raw, MASK)
    want = [[4 ** (1 / 3)] * 3, [0.5, 0.5, 0.0], [0.0] * 3]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-8, atol=0)


def kept(rule, high, low=None):
    return correction.keep(rule, OLD, ROLLOUT, MASK, high=high, low=low).long().tolist()


def k3(ratio):
    return ratio - 1 - math.log(ratio)


LN2 = math.log(2)
EDGE = 1e-9


@pytest.mark.parametrize(
    ("rule", "high", "low", "want"),
    [
        # k1 = -log ratio: -ln 2, ln 2, -2 ln 2 | 2 ln 2, 0
        ("token_k1", 2.001, None, [[1, 1, 0], [0, 1, 0]]),
        ("token_k1", 4.001, 0.6, [[0, 1, 0], [1, 1, 0]]),
        ("token_k1", 1.5, 0.2, [[1, 0, 1], [0, 1, 0]]),
        ("seq_sum_k1", 4.001, 0.3, [[0, 0, 0], [1, 1, 0]]),  # sums -2 ln 2 and 2 ln 2
        ("seq_sum_k1", 4.001, None, [[1, 1, 1], [1, 1, 0]]),
        ("seq_mean_k1", 1.9, None, [[1, 1, 1], [0, 0, 0]]),  # means -2/3 ln 2 and ln 2
        # k2 = (log ratio)^2 / 2, in halves of (ln 2)^2: 1, 1, 4 | 4, 0
        ("token_k2", LN2**2 / 2 + EDGE, None, [[1, 1, 0], [0, 1, 0]]),
        ("seq_sum_k2", LN2**2 / 2 * 4 + EDGE, None, [[0, 0, 0], [1, 1, 0]]),
        ("seq_mean_k2", LN2**2 / 2 * 2 + EDGE, None, [[1, 1, 1], [1, 1, 0]]),
        ("seq_mean_k2", LN2**2 / 2 * 2 - 1e-6, None, [[0, 0, 0], [0, 0, 0]]),
        ("seq_max_k2", LN2**2 / 2 * 4 + EDGE, None, [[1, 1, 1], [1, 1, 0]]),
        ("seq_max_k2", LN2**2 / 2 * 4 - EDGE, None, [[0, 0, 0], [0, 0, 0]]),
        # k3 = ratio - 1 - log ratio
        ("token_k3", k3(0.25) + EDGE, None, [[1, 1, 0], [1, 1, 0]]),
        ("token_k3", k3(0.25) - EDGE, None, [[1, 1, 0], [0, 1, 0]]),
        ("seq_sum_k3", k3(0.25) + EDGE, None, [[0, 0, 0], [1, 1, 0]]),
        ("seq_mean_k3", (k3(2) + k3(0.5) + k3(4)) / 3 + EDGE, None, [[1, 1, 1], [1, 1, 0]]),
        ("seq_mean_k3", (k3(2) + k3(0.5) + k3(4)) / 3 - 1e-6, None, [[0, 0, 0], [1, 1, 0]]),
        ("seq_max_k3", k3(4) - EDGE, None, [[0, 0, 0], [1, 1, 0]]),
    ],
)
def test_rejection(rule, high, low, want):
    assert kept(rule, high, low) == [*want, [0, 0, 0]]


def test_every_rule_is_tested_and_no_other_known():
    tested = {mark.args[1][i][0] for mark in test_rejection.pytestmark for i in range(len(mark.args[1]))}
    assert tested == set(correction.REJECTION_RULES)
    with pytest.raises(AssertionError, match="unknown rule seq_max_k1"):
        kept("seq_max_k1", 2.0)


@pytest.mark.parametrize("rule", correction.REJECTION_RULES)
def test_equal_policies_keep_everything(rule):
    keep = correction.keep(rule, ROLLOUT, ROLLOUT, MASK, high=1.0001)
    assert torch.equal(keep, MASK)
    assert correction.keep(rule, ROLLOUT[:, :0], ROLLOUT[:, :0], MASK[:, :0], high=2.0).shape == (3, 0)
