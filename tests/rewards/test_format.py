"""The format reward."""

import pytest

from ullage.rewards.format import score


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a\nb</think><answer>4</answer>", 1.0),
        ("  <think></think>\n\n<answer></answer>\n", 1.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("Well: <think>a</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer> done", 0.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0.0),
        ("<think>a<answer>4</answer></think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4", 0.0),
        ("", 0.0),
    ],
)
def test_tags(response, expected):
    assert score("", response, None) == expected


def test_pattern_has_to_match_everything():
    assert score("", "Answer: 42\n", None, pattern=r"Answer: \d+") == 1.0
    assert score("", "The Answer: 42", None, pattern=r"Answer: \d+") == 0.0
    assert score("", "a\nb", None, pattern="a.b") == 1.0
