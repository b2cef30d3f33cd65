r"""GSM8K: the final number of the response against the final number of the reference solution.

>>> score("", "She has 3 + 15 = 18 eggs.\n#### 18", "9 * 2 = 18\n#### 18")
1.0
>>> score("", "so that makes \\boxed{\\$1{,}250.00} in 3 days", "1250")
1.0
>>> score("", "The answer is $18.", "18", method="strict")
0.0
"""

import re
from decimal import Decimal
from typing import Any

from ullage.rewards.results import Judged

# Digits with or without thousands separators; a minus only where it cannot be a subtraction.
NUMBER = (
    r"(?:(?<![\d)])-(?:\\?\$)?|\\?\$-?)?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)
MARKED = re.compile(r"####\s*(" + NUMBER + ")")


def score(prompt: Any, response: str, target: Any, *, method: str = "flexible", **kwargs: Any) -> Judged:  # noqa: ANN401
    """1 where the numbers are equal.

    Args:
        method: `strict` takes only what follows `####`, as verl's default does; `flexible` falls back to `\\boxed{}`,
            then to the last number.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method is 'strict' or 'flexible', not {method!r}")
    expected = final_number(str(target))
    if expected is None:
        raise ValueError(f"the target holds no number: {str(target)[:80]!r}")
    found = marked_number(response) if method == "strict" else final_number(response)
    return Judged(found == expected, number_text(found))


def final_number(text: str) -> Decimal | None:
    r"""The number after the last `####`, else in the last `\boxed{}`, else the last one.

    >>> final_number("first 7 then 8")
    Decimal('8')
    """
    for found in (marked_number(text), last_number(boxed(text))):
        if found is not None:
            return found
    return last_number(text)


def marked_number(text: str) -> Decimal | None:
    """The number right after the last `####` that has one."""
    matches = MARKED.findall(_plain(text))
    return _decimal(matches[-1]) if matches else None


def last_number(text: str) -> Decimal | None:
    """The last number of a text: signs, dollars and thousands separators understood.

    >>> last_number("10-3 is -$1,007.50.")
    Decimal('-1007.50')
    """
    matches = re.findall(NUMBER, _plain(text))
    return _decimal(matches[-1]) if matches else None


def number_text(number: Decimal | None) -> str:
    """The same text for equal numbers; empty for none.

    >>> number_text(Decimal("-1007.50")), number_text(Decimal("-0.0")), number_text(None)
    ('-1007.5', '0', '')
    """
    if not number:
        return "" if number is None else "0"
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def boxed(text: str) -> str:
    r"""The contents of the last `\boxed{}`, braces balanced; empty where there is none.

    >>> boxed(r"\boxed{1} or rather \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind(r"\boxed{")
    if start < 0:
        return ""
    start += len(r"\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return ""


def _plain(text: str) -> str:
    """LaTeX's thousands separator and the Unicode minus, as ASCII."""
    return text.replace("{,}", ",").replace("\N{MINUS SIGN}", "-")


def _decimal(number: str) -> Decimal:
    return Decimal(re.sub(r"[\\$,]", "", number))
