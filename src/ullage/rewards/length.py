"""Length: 0 inside the wanted range, falling to -1 outside it. Above, it is DAPO's overlong penalty (arXiv:2503.14476).

>>> [score("", "", None, max_length=100, buffer=20, response_length=n) for n in (80, 90, 100, 500)]
[0.0, -0.5, -1.0, -1.0]
>>> score("", "four words are here", None, min_length=8, max_length=20, buffer=8, unit="words")
-0.5
"""

from typing import Any


def score(
    prompt: Any,  # noqa: ANN401
    response: str,
    target: Any,  # noqa: ANN401
    *,
    max_length: int,
    min_length: int = 0,
    buffer: int = 0,
    unit: str = "tokens",
    response_length: int | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> float:
    """0 from `min_length` to `max_length - buffer`; from there down to -1, linearly over `buffer`.

    Args:
        buffer: width of each slope; with 0 the penalty is a step.
        unit: `tokens` (counted by the run), `words` or `characters`.
    """
    length = _length(response, unit, response_length)
    excess = max(length - (max_length - buffer), min_length - length, 0)
    return 0.0 - min(1.0, excess / buffer if buffer else float(excess > 0))


def _length(response: str, unit: str, response_length: int | None) -> int:
    if unit == "words":
        return len(response.split())
    if unit == "characters":
        return len(response)
    if unit != "tokens":
        raise ValueError(f"unit is 'tokens', 'words' or 'characters', not {unit!r}")
    if response_length is None:
        raise ValueError("unit 'tokens' needs response_length")
    return response_length
