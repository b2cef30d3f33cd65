"""What a reward function returned, as numbers, or as the reason why it cannot be one."""

import math
import reprlib
from typing import Any, NamedTuple, Self

from ullage.base.user_code import printable

MAX_ANSWER = 1000
"""Characters of an answer that are kept; longer ones are compared by these."""


class UnusableResult(Exception):  # noqa: N818 -- not a failure of the program: it becomes the sample's error text
    """The returned value is not a score."""


class Result(NamedTuple):
    """One function's verdict: `score` is None where a TRL function says that it does not apply to the sample."""

    score: float | None
    metrics: dict[str, float]
    answer: str | None = None
    """What the function took for the response's answer; empty where it found none, None where it does not tell."""


class Judged(float):
    """A score that remembers the answer it was given for; in every other way a plain number."""

    answer: str

    def __new__(cls, score: float, answer: str) -> Self:
        judged = super().__new__(cls, score)
        judged.answer = answer
        return judged


def read_result(value: Any) -> Result:  # noqa: ANN401 -- whatever a user's function returns
    """The score of a plain or verl function: a finite number, or a dict with `score`, whose other numbers are kept.

    The dict's `pred` is the answer, as it is for verl.
    """
    if not isinstance(value, dict):
        return Result(_finite(value), {}, value.answer[:MAX_ANSWER] if isinstance(value, Judged) else None)
    if "score" not in value:
        raise UnusableResult(f"returned a dict without 'score': it has {_shown(sorted(map(str, value)))}")
    metrics = {}
    for key, item in value.items():
        try:
            metrics[str(key)] = _finite(item)
        except UnusableResult:
            continue  # texts such as the extracted answer are not metrics
    metrics.pop("score", None)
    return Result(_finite(value["score"]), metrics, _answer(value.get("pred"), metrics.get("pred")))


def read_list_result(value: Any) -> Result:  # noqa: ANN401
    """The score of a TRL function that was given one completion: a list of exactly one number or None."""
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__getitem__") or getattr(value, "ndim", 1) != 1:
        raise UnusableResult(f"returned {_described(value)}, not a list of one score")
    if len(value) != 1:
        raise UnusableResult(f"returned a list of length {len(value)} for 1 completion")
    return Result(None if value[0] is None else _finite(value[0]), {})


def _answer(prediction: Any, as_number: float | None) -> str | None:  # noqa: ANN401
    if isinstance(prediction, str):
        return prediction[:MAX_ANSWER]
    return None if as_number is None else repr(as_number)


def _finite(value: Any) -> float:  # noqa: ANN401
    # Numbers of other libraries (numpy, torch, Decimal, sympy) convert themselves; arrays, even of one element, do not.
    if not hasattr(type(value), "__float__") or getattr(value, "ndim", 0) != 0:
        raise UnusableResult(f"returned {_described(value)}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UnusableResult(f"returned {_described(value)}") from None
    if not math.isfinite(number):
        raise UnusableResult(f"returned {'NaN' if math.isnan(number) else number}")
    return number


def _described(value: Any) -> str:  # noqa: ANN401
    if value is None:
        return "None"
    if isinstance(value, str | bytes):
        return f"the {type(value).__name__} {_shown(value)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of length {len(value)}"
    return f"a value of type {type(value).__name__}"


def _shown(value: Any) -> str:  # noqa: ANN401
    return printable(reprlib.repr(value))
