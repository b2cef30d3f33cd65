"""The calculator: arithmetic and nothing else, however large it is meant to be."""

import pytest

from ullage.environments._calculator import CannotCalculate, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("6*7", "42"),
        (" (1 + 2) ** 3 - 4 % 3 ", "26"),
        ("2^10", "1024"),
        ("7 // 2 + 7 / 2", "6.5"),
        ("-3 + +5", "2"),
        ("sqrt(16) + abs(-2)", "6.0"),
        ("max(1, 5, 3) - gcd(12, 18)", "-1"),
        ("round(2.5) + floor(pi)", "5"),
        ("2 ** -1", "0.5"),
        ("2 ** 2000 // 2 ** 1990", "1024"),
        ("round(1234, -2) + round(2.345, 1)", "1202.3"),
        ("round(5, -1000)", "0"),
        ("abs(" * 190 + "-1" + ")" * 190, "1"),
        ("9" * 1000, "9" * 1000),
    ],
)
def test_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9**9", "the power is too large"),
        ("2 ** 5000", "the power is too large"),
        ("10 ** 1000 * 10 ** 1000", "the number is too large"),
        ("9" * 999 + "*", "not an arithmetic expression"),
        ("1" * 1001, "longer than 1000 characters"),
        ("1e308 * 10", "the number is too large"),
        ("exp(1000)", "math range error"),
        ("round(5, -99999999)", "no more than 1000 digits"),
        ("round(5, -10 ** 1000)", "no more than 1000 digits"),
        ("round(2.5, 10 ** 1000)", "no more than 1000 digits"),
        ("2.0 ** 10 ** 1000", "too large"),
        (f"lcm({', '.join(f'9 ** 1000 + {term}' for term in range(60))})", "the number is too large"),
        ("1 << 99999999", "not arithmetic"),
        ("factorial(99999)", "not arithmetic"),
        ("\udc80", "surrogates not allowed"),
        ("1/0", "division by zero"),
        ("(-8) ** 0.5", "not a real number"),
        ("__import__('os').getcwd()", r"not arithmetic: __import__\('os'\).getcwd\(\)"),
        ("(1).__class__", "not arithmetic"),
        ("'a' * 10", "not arithmetic: 'a'"),
        ("True + 1", "not arithmetic: True"),
        ("[1, 2]", "not arithmetic"),
        ("lambda: 1", "not arithmetic"),
        ("round(number=1)", "not arithmetic"),
        ("floor(1, 2)", "takes exactly one argument"),
        ("x + 1", "not arithmetic: x"),
        ("1 +", "not an arithmetic expression"),
        ("(" * 400, "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("1\0", "null bytes|not an arithmetic expression"),
    ],
)
def test_everything_else_is_refused_with_a_reason(expression, reason):
    with pytest.raises(CannotCalculate, match=reason):
        calculate(expression)
