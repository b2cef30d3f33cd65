r"""Format: whether the response has the asked form; by default thinking, then an answer, in tags.

>>> score("", "<think>2 and 2</think>\n<answer>4</answer>", "4")
1.0
>>> score("", "<answer>4</answer>", "4")
0.0
>>> score("", "Answer: 4", "4", pattern=r"Answer: \d+")
1.0
"""

import re
from typing import Any

TAGGED = (
    r"<think>(?:(?!</?(?:think|answer)>).)*</think>\s*"  # no tag inside another
    r"<answer>(?:(?!</?(?:think|answer)>).)*</answer>"
)


def score(prompt: Any, response: str, target: Any, *, pattern: str = TAGGED, **kwargs: Any) -> float:  # noqa: ANN401
    """1 where the whole response, without the white space around it, matches `pattern`; a dot matches line ends."""
    return float(re.fullmatch(pattern, response.strip(), flags=re.DOTALL) is not None)
