"""A calculator for untrusted text: arithmetic by walking the syntax tree, with limits on the size of every number.

>>> calculate("2 * (3 + 4) ** 2")
'98'
>>> calculate("sqrt(2) / 3")
'0.47140452079103173'
"""

import ast
import math
import operator
from collections.abc import Callable

MAX_CHARACTERS = 1000
MAX_BITS = 4096
"""Of an integer: 1233 decimal digits."""
MAX_DIGITS = 1000
"""That `round` is asked for."""

Number = int | float

BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, Callable[..., Number]] = {
    "abs": abs, "min": min, "max": max, "round": round, "floor": math.floor, "ceil": math.ceil, "sqrt": math.sqrt,
    "exp": math.exp, "log": math.log, "log2": math.log2, "log10": math.log10, "sin": math.sin, "cos": math.cos,
    "tan": math.tan, "asin": math.asin, "acos": math.acos, "atan": math.atan, "gcd": math.gcd, "lcm": math.lcm,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}


class CannotCalculate(Exception):  # noqa: N818 -- not a failure of the program: its text is what the model reads
    """The text is not arithmetic, or is too large."""


def calculate(expression: str) -> str:
    """The value as Python writes it."""
    if len(expression) > MAX_CHARACTERS:
        raise CannotCalculate(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        value = _value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body)
        return str(value)
    except CannotCalculate:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CannotCalculate(str(error)) from None
    except (SyntaxError, RecursionError, MemoryError):  # the parser's own, for text that is too deep
        raise CannotCalculate("not an arithmetic expression") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in UNARY:
            return UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in BINARY:
            return _combined(type(sign), _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _applied(name, [_value(argument) for argument in arguments])
    raise CannotCalculate(f"not arithmetic: {ast.unparse(node)[:60]}")


def _combined(sign: type[ast.operator], left: Number, right: Number) -> Number:
    # Before it is computed: the power of two small numbers can fill the memory.
    whole = sign is ast.Pow and isinstance(left, int) and isinstance(right, int)
    if whole and abs(right) * max(int(left).bit_length(), 1) > MAX_BITS:
        raise CannotCalculate("the power is too large")
    return _bounded(BINARY[sign](left, right))


def _applied(name: str, arguments: list[Number]) -> Number:
    # Before it is computed, too: round(5, -99999999) would need the power of ten.
    if name == "round" and any(abs(digits) > MAX_DIGITS for digits in arguments[1:]):
        raise CannotCalculate(f"round takes no more than {MAX_DIGITS} digits")
    return _bounded(FUNCTIONS[name](*arguments))


def _bounded(value: Number) -> Number:
    if isinstance(value, complex):
        raise CannotCalculate("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise CannotCalculate("the number is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise CannotCalculate("the number is too large")
    return value
