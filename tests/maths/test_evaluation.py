"""Evaluation maths by hand, and against the mean over every subset of k responses."""

import math
from collections import Counter
from itertools import combinations

import pytest

from ullage.maths.evaluation import best_at, majority_at, mean_at, pass_at

SCORES = [0.5, 0.0, 1.0, 0.25, 1.0, 0.0, 0.75]
ANSWERS = ["b", "a", "c", "a", "c", "a", "d"]
SCORE_OF = {"a": 0.0, "b": 1.0, "c": 0.5, "d": 0.25}


def over_subsets(items, k, value):
    subsets = list(combinations(items, k))
    return math.fsum(value(subset) for subset in subsets) / len(subsets)


def winner_score(subset):
    counts = Counter(subset)
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    return math.fsum(SCORE_OF[answer] for answer in first) / len(first)


def test_mean():
    assert mean_at([1.0, 0.0, 0.5, 0.5]) == 0.5


def test_pass_by_hand():
    # 2 of 4 correct: one draw hits with 1/2, two draws miss with 1/6, three cannot miss.
    assert [pass_at(4, 2, k) for k in (1, 2, 3, 4)] == [0.5, pytest.approx(5 / 6, rel=1e-15), 1.0, 1.0]
    assert pass_at(4, 0, 4) == 0.0
    assert pass_at(4, 4, 1) == 1.0


@pytest.mark.parametrize("k", range(1, 8))
def test_pass_is_the_mean_over_subsets(k):
    correct = [score == 1.0 for score in SCORES]
    assert pass_at(7, 2, k) == pytest.approx(over_subsets(correct, k, any), rel=1e-14)


def test_best_by_hand():
    # Pairs of 0, 1, 3: maxima 1, 3, 3.
    assert best_at([3.0, 0.0, 1.0], 2) == pytest.approx(7 / 3, rel=1e-15)
    assert best_at([3.0, 0.0, 1.0], 3) == 3.0


@pytest.mark.parametrize("k", range(1, 8))
def test_best_is_the_mean_over_subsets(k):
    assert best_at(SCORES, k) == pytest.approx(over_subsets(SCORES, k, max), rel=1e-14)


def test_best_of_right_and_wrong_is_pass():
    assert best_at([1.0, 0.0, 0.0, 1.0, 0.0], 3) == pytest.approx(pass_at(5, 2, 3), rel=1e-14)


def test_majority_by_hand():
    # Of a, a, b: every pair of a and b ties, two of three pairs do; a has score 1.
    assert majority_at(["a", "b", "a"], [1.0, 0.0, 1.0], 2) == pytest.approx(1 / 3 + 2 / 3 / 2, rel=1e-15)
    assert majority_at(["a", "b", "a"], [1.0, 0.0, 1.0], 3) == 1.0
    assert majority_at(["a", "b", "a"], [1.0, 0.0, 1.0], 1) == pytest.approx(2 / 3, rel=1e-15)


def test_responses_with_one_answer_share_their_scores():
    assert majority_at(["a", "a", "b"], [1.0, 0.5, 0.0], 3) == 0.75


@pytest.mark.parametrize("k", range(1, 8))
def test_majority_is_the_mean_over_subsets(k):
    got = majority_at(ANSWERS, [SCORE_OF[answer] for answer in ANSWERS], k)
    assert got == pytest.approx(over_subsets(ANSWERS, k, winner_score), rel=1e-13)


def test_majority_of_many_responses():
    answers = [i * i % 23 for i in range(48)]
    assert majority_at(answers, [1.0] * 48, 16) == pytest.approx(1.0, rel=1e-13)


@pytest.mark.parametrize("k", [0, 4])
def test_k_beyond_the_responses_is_a_bug(k):
    for call in (
        lambda: pass_at(3, 1, k),
        lambda: best_at([1.0] * 3, k),
        lambda: majority_at(["a"] * 3, [1.0] * 3, k),
    ):
        with pytest.raises(AssertionError, match=f"k = {k} of 3 responses"):
            call()
