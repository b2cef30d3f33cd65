"""The length reward, by hand-computed values."""

import pytest

from ullage.rewards.length import score


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (80, 0.0), (85, -0.25), (100, -1.0), (101, -1.0)])
def test_dapo_overlong_penalty(length, expected):
    assert score("", "", None, max_length=100, buffer=20, response_length=length) == expected


@pytest.mark.parametrize(("length", "expected"), [(0, -1.0), (10, -1.0), (15, -0.5), (20, 0.0), (30, 0.0), (35, -0.5)])
def test_range(length, expected):
    assert score("", "", None, min_length=20, max_length=40, buffer=10, response_length=length) == expected


def test_without_buffer_it_is_a_step():
    assert [score("", "", None, max_length=5, response_length=n) for n in (4, 5, 6)] == [0.0, 0.0, -1.0]


def test_units():
    assert score("", "one two three", None, max_length=3, buffer=2, unit="words") == -1.0
    assert score("", "one two", None, max_length=3, buffer=2, unit="words") == -0.5
    assert score("", "äöü", None, max_length=4, buffer=4, unit="characters") == -0.75


def test_wrong_unit_and_missing_token_count_say_so():
    with pytest.raises(ValueError, match="not 'lines'"):
        score("", "", None, max_length=3, unit="lines")
    with pytest.raises(ValueError, match="needs response_length"):
        score("", "", None, max_length=3)
