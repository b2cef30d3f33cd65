"""The rule of the arithmetic reward."""

import pytest

from ullage.rewards.arithmetic import score


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("8", 1.0),
        (" 8.", 1.0),
        ("5 + 3 = 8.", 1.0),
        ("\n\n8\n9", 1.0),
        ("The answer is 8", 1.0),
        ("8.0", 1.0),
        ("9\n8", 0.0),
        ("8 9", 0.0),
        ("8.5", 0.0),
        ("18", 0.0),
        ("-8", 0.0),
        ("eight", 0.0),
        ("", 0.0),
        ("  \n ", 0.0),
    ],
)
def test_last_number_of_the_first_line(response, correct):
    assert score("What is 5 + 3?", response, "8") == correct
    assert score("What is 5 + 3?", response, 8) == correct


def test_the_answer_is_that_number():
    assert [score("", response, "8").answer for response in ("5 + 3 = 8.0\n9", "no", "")] == ["8", "", ""]


def test_negative_target():
    assert score("", "3 - 5 = -2", -2) == 1.0
    assert score("", "3-5", -5) == 0.0
