r"""Mathematics: whether the final expression equals the reference, decided by math-verify.

>>> score("", r"Hence the answer is $\boxed{\frac{2}{4}}$.", r"\frac{1}{2}")
1.0
>>> score("", "I think it is 3", "4")
0.0
"""

from typing import Any

from ullage.base.errors import ConfigError
from ullage.rewards.results import Judged

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ConfigError(
        f"the reward 'math' needs the package math-verify: {error}", "install it: pip install 'ullage[math]'"
    ) from error


def score(prompt: Any, response: str, target: Any, **kwargs: Any) -> Judged:  # noqa: ANN401
    """1 where the expressions are equal."""
    # math-verify's own time limits use SIGALRM, which C code ignores; the worker is killed from outside instead.
    expected = parse(_as_mathematics(str(target)), parsing_timeout=None)
    if not expected:
        raise ValueError(f"the target is not an expression: {str(target)[:80]!r}")
    found = parse(
        response,
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=None,
    )
    equal = verify(expected, found, timeout_seconds=None)
    # Equal expressions are one answer, however they are written.
    return Judged(equal, _text(expected if equal else found))


def _text(parsed: list[Any]) -> str:
    """What math-verify read: an expression, then the text it stood in."""
    try:
        return str(parsed[0]) if parsed else ""
    except ValueError:  # an integer of more digits than Python prints
        return str(parsed[-1])


def _as_mathematics(target: str) -> str:
    """LaTeX is only read between delimiters, and data sets store it without them."""
    delimited = any(mark in target for mark in ("$", r"\(", r"\[", r"\boxed"))
    return target if delimited else f"${target}$"
