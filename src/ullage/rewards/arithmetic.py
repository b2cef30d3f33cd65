r"""Arithmetic: the last number of the response's first line that is not empty.

The first line only, because a small model that has answered often goes on to invent the next exercise; the last number
of it, because "5 + 3 = 8." is an answer too.

>>> score("What is 5 + 3?", "5 + 3 = 8.\nWhat is 1 + 1? 2", 8)
1.0
>>> score("What is 5 + 3?", "8 or 9", "8")
0.0
"""

from decimal import Decimal
from typing import Any

from ullage.rewards.gsm8k import last_number


def score(prompt: Any, response: str, target: Any, **kwargs: Any) -> float:  # noqa: ANN401
    """1 where that number is the target."""
    lines = response.strip().splitlines()
    return float(bool(lines) and last_number(lines[0]) == Decimal(str(target)))
