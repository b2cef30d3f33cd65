"""DAPO's overlong penalty by hand: limit 20, buffer 4, so the fall begins after 16 tokens."""

import pytest

from ullage.maths.overlong import overlong_penalty


@pytest.mark.parametrize(("length", "want"), [(0, 0.0), (16, 0.0), (17, -0.5), (18, -1.0), (20, -2.0), (22, -3.0)])
def test_by_hand(length, want):
    assert overlong_penalty(length, max_length=20, buffer=4, factor=2.0) == want


@pytest.mark.parametrize("length", [0, 20, 30])
def test_no_buffer_no_penalty(length):
    assert overlong_penalty(length, max_length=20, buffer=0, factor=1.0) == 0.0
