"""The math reward: real answers through math-verify."""

import subprocess
import sys

import pytest

from ullage.rewards.math import score


@pytest.mark.parametrize(
    ("response", "target", "expected"),
    [
        (r"so $\boxed{\frac{2}{4}}$", r"\frac{1}{2}", 1.0),
        (r"so $\boxed{0.5}$", r"$\frac{1}{2}$", 1.0),
        (r"first $x = 7$, then \boxed{3}", "3", 1.0),
        ("The final answer is 1,000", "1000", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{4}", "3", 0.0),
        ("I do not know", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_score(response, target, expected):
    assert score("", response, target) == expected


def test_equal_expressions_are_one_answer():
    right = [r"\boxed{x^2+2x+1}", r"\boxed{(x+1)^2}", r"so $(1+x)^2$"]
    assert len({score("", response, "x^2+2x+1").answer for response in right}) == 1
    wrong = [r"\boxed{\frac{2}{4}}", r"\boxed{0.5}", r"$\frac12$"]
    assert {score("", response, "3").answer for response in wrong} == {"1/2"}
    assert score("", "I do not know", "3").answer == ""
    # As it is written, where the number has more digits than Python prints.
    assert score("", r"\boxed{\binom{20000}{9999}}", "3").answer == r"\binom{20000}{9999}"


def test_target_that_is_no_expression_is_an_error():
    with pytest.raises(ValueError, match="not an expression: ''"):
        score("", "3", "")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("math", "math_verify", "ullage[math]"), ("reasoning_gym", "reasoning_gym", "ullage[reasoning-gym]")],
)
def test_missing_package_names_the_extra(name, package, extra):
    program = f"""
import importlib, sys
sys.modules[{package!r}] = None
from ullage.base.errors import ConfigError
try:
    importlib.import_module("ullage.rewards.{name}")
except ConfigError as error:
    sys.stdout.write(str(error))
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert f"the reward '{name}' needs the package" in output
    assert f"pip install '{extra}'" in output
