"""Which returned values are scores."""

from decimal import Decimal
from fractions import Fraction

import numpy
import pytest

from ullage.base.user_code import printable, raised
from ullage.rewards.results import Judged, Result, UnusableResult, read_list_result, read_result


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0.25, 0.25),
        (1, 1.0),
        (True, 1.0),
        (False, 0.0),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(2), 2.0),
        (numpy.bool_(True), 1.0),
        (numpy.array(0.5), 0.5),
        (Decimal("0.5"), 0.5),
        (Fraction(1, 4), 0.25),
    ],
)
def test_numbers(value, score):
    assert read_result(value) == Result(score, {})
    assert read_list_result([value]) == Result(score, {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "returned None"),
        (float("nan"), "returned NaN"),
        (float("-inf"), "returned -inf"),
        (numpy.float32("nan"), "returned NaN"),
        ("0.5", "returned the str '0.5'"),
        ([0.5], "returned a list of length 1"),
        ((), "returned a tuple of length 0"),
        (numpy.array([0.5]), "returned a value of type ndarray"),
        (1j, "returned a value of type complex"),
        (object(), "returned a value of type object"),
        (10**400, "returned a value of type int"),
        pytest.param(9**9**6, "returned a value of type int", id="too long to print"),
        ({}, r"returned a dict without 'score': it has \[\]"),
        ({"reward": 1.0}, r"returned a dict without 'score': it has \['reward'\]"),
        ({"score": None}, "returned None"),
        ({"score": "1"}, "returned the str '1'"),
    ],
)
def test_anything_else_is_named(value, text):
    with pytest.raises(UnusableResult, match=f"^{text}$"):
        read_result(value)


def test_dict_keeps_its_other_numbers():
    value = {"score": 0.5, "acc": True, "pred": "18", "bad": float("nan"), "n": numpy.int64(3)}
    assert read_result(value) == Result(0.5, {"acc": 1.0, "n": 3.0}, "18")


@pytest.mark.parametrize(
    ("prediction", "answer"),
    [
        ("", ""),
        (18, "18.0"),
        (numpy.float32(0.5), "0.5"),
        (None, None),
        (["18"], None),
        pytest.param(10**5000, None, id="too long to print"),
        pytest.param("x" * 2000, "x" * 1000, id="too long to keep"),
    ],
)
def test_prediction_of_a_dict_is_the_answer(prediction, answer):
    assert read_result({"score": 1.0, "pred": prediction}).answer == answer


def test_a_judged_score_is_a_number_that_tells_its_answer():
    judged = Judged(True, "18")
    assert (judged, repr(judged), judged / 2) == (1.0, "1.0", 0.5)
    assert read_result(judged) == Result(1.0, {}, "18")
    assert read_result(judged / 2) == Result(0.5, {})
    assert read_result(Judged(0.0, "x" * 2000)).answer == "x" * 1000


@pytest.mark.parametrize("value", [[0.5], (0.5,), numpy.array([0.5])])
def test_list_of_one(value):
    assert read_list_result(value) == Result(0.5, {})


def test_list_with_none_means_not_applicable():
    assert read_list_result([None]) == Result(None, {})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([], "list of length 0 for 1 completion"),
        ([1.0, 2.0], "list of length 2 for 1 completion"),
        (1.0, "a value of type float, not a list of one score"),
        (None, "None, not a list of one score"),
        ("5", "the str '5', not a list"),
        ({"score": 1.0}, "not a list of one score"),
        (numpy.array(1.0), "a value of type ndarray, not a list"),
        (numpy.ones((1, 1)), "a value of type ndarray, not a list"),
        ([[1.0]], "a list of length 1"),
        ([float("nan")], "NaN"),
    ],
)
def test_wrong_lists_are_named(value, text):
    with pytest.raises(UnusableResult, match=f"^returned .*{text}"):
        read_list_result(value)


def test_raised_survives_an_exception_without_text():
    class SilentError(Exception):
        def __str__(self):
            raise ValueError

    assert raised(SilentError(), None) == "raised SilentError"
    assert raised(KeyError("a"), None) == "raised KeyError: 'a'"


def test_printable_is_one_bounded_line_without_control_characters():
    assert printable("a\nb\x1b[31mc") == "a b [31mc"
    assert printable("x" * 400) == "x" * 300 + "…"
