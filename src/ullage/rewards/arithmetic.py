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

from ullage.rewards.gsm8k import last_number, number_text
from ullage.rewards.results import Judged


def score(prompt: Any, response: str, target: Any, **kwargs: Any) -> Judged:  # noqa: ANN401
    """1 where that number is the target."""
    lines = response.strip().splitlines()
    found = last_number(lines[0]) if lines else None
    return Judged(found == Decimal(str(target)), number_text(found))
