"""The GSM8K reward against answers as models write them."""

from decimal import Decimal

import pytest

from ullage.rewards.gsm8k import boxed, final_number, last_number, score


@pytest.mark.parametrize(
    ("response", "target", "flexible", "strict"),
    [
        ("3 + 15 = 18\n#### 18", "18", 1.0, 1.0),
        ("#### 18\nand 7 more words", "18", 1.0, 1.0),
        ("#### 17 no, #### 18", "18", 1.0, 1.0),
        ("#### $1,234.50", "1234.5", 1.0, 1.0),
        ("####-3", "-3", 1.0, 1.0),
        ("#### 18.", "18", 1.0, 1.0),
        ("#### nothing, it is 18", "18", 1.0, 0.0),
        (r"\boxed{18} after 3 days", "18", 1.0, 0.0),
        (r"\boxed{\$1{,}000}", "1,000", 1.0, 0.0),
        ("The answer is 18.", "18", 1.0, 0.0),
        ("18 apples, 3 pears", "18", 0.0, 0.0),
        ("It costs $18.00 in all.", "#### 18", 1.0, 0.0),
        ("", "18", 0.0, 0.0),
        ("eighteen", "18", 0.0, 0.0),
        ("1818", "18", 0.0, 0.0),
        ("-18", "18", 0.0, 0.0),
    ],
)
def test_score(response, target, flexible, strict):
    assert score("", response, target) == flexible
    assert score("", response, target, method="strict") == strict


@pytest.mark.parametrize(
    ("response", "flexible", "strict"),
    [
        ("3 + 15 = 18\n#### 18", "18", "18"),
        ("so $1,250.00", "1250", ""),
        ("#### 0.50", "0.5", "0.5"),
        ("#### -0", "0", "0"),
        ("#### 00700", "700", "700"),
        pytest.param("9" * 5000, "9" * 5000, "", id="5000 digits"),
        ("none", "", ""),
    ],
)
def test_answer_is_the_same_text_for_equal_numbers(response, flexible, strict):
    assert score("", response, "18").answer == flexible
    assert score("", response, "18", method="strict").answer == strict


def test_target_may_be_a_whole_solution_or_a_number():
    assert score("", "so 5", "She has 2 + 3 = <<2+3=5>>5 left.\n#### 5") == 1.0
    assert score("", "so 5", 5) == 1.0
    assert score("", "so 5", 5.0) == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10-3", Decimal(3)),
        ("= -3", Decimal(-3)),
        ("-$5", Decimal(-5)),
        ("$-5", Decimal(-5)),
        ("\N{MINUS SIGN}5", Decimal(-5)),
        ("1,2,3", Decimal(3)),
        ("12,345,678", Decimal(12345678)),
        ("3.", Decimal(3)),
        ("3.25", Decimal("3.25")),
        ("(4)-7", Decimal(7)),
        ("none", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == number


def test_boxed_needs_its_closing_brace():
    assert boxed(r"\boxed{1") == ""
    assert final_number(r"\boxed{ so 4") == Decimal(4)


def test_wrong_method_and_target_without_a_number_say_so():
    with pytest.raises(ValueError, match="'strict' or 'flexible', not 'loose'"):
        score("", "1", "1", method="loose")
    with pytest.raises(ValueError, match="no number: 'many'"):
        score("", "1", "many")


def test_long_text_takes_no_time():
    assert score("", "1" * 200_000 + "," * 200_000 + " 7", "7") == 1.0
