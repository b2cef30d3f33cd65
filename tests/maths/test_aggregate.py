"""Token weights by hand, and their independence of any split."""

import pytest
import torch

from ullage.maths.aggregate import Counts, count, token_weights

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
MODES = {
    "token-sum": [1.0, 1.0],
    "token-mean": [1 / 4, 1 / 4],
    "seq-mean-token-sum": [1 / 2, 1 / 2],
    "seq-mean-token-mean": [1 / 6, 1 / 2],
    "seq-mean-token-sum-norm": [1 / 20, 1 / 20],
}


def weights(mask, mode, counts):
    return token_weights(mask, mode, counts, scale=10.0, dtype=torch.float64)


def test_count_leaves_out_sequences_without_loss():
    assert count(MASK) == (4.0, 2.0)
    assert count(MASK[1:2]) == (0.0, 0.0)
    assert count(MASK[:0]) == (0.0, 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_weights_by_hand(mode):
    got = weights(MASK, mode, Counts(*count(MASK)))
    first, last = MODES[mode]
    want = torch.tensor([[first, first, 0, first], [0, 0, 0, 0], [last, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-8)


@pytest.mark.parametrize("mode", MODES)
def test_parts_have_the_weights_of_the_whole(mode):
    counts = Counts(*count(MASK))
    whole = weights(MASK, mode, counts)
    parts = torch.cat([weights(MASK[i : i + 1], mode, counts) for i in range(3)])
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_loss_has_weights_zero(mode):
    assert weights(MASK[1:2], mode, Counts(0.0, 0.0)).tolist() == [[0.0] * 4]


def test_an_unknown_mode_is_a_bug():
    with pytest.raises(AssertionError, match="unknown aggregation mode median"):
        weights(MASK, "median", Counts(1, 1))
