"""Reasoning-gym tasks with several attempts."""

import pytest

from ullage.base.errors import ConfigError, DataError
from ullage.data.reasoning_gym_process import make_rows
from ullage.environments import Row, Turn
from ullage.environments.reasoning_gym import Environment


@pytest.fixture(scope="module")
def row():
    (made,) = make_rows("chain_sum", {"size": 1, "seed": 7})
    return Row(prompt=made["prompt"], target=made["answer"], source="chain_sum", extra=made, seed=0)


def begun(row, **kwargs):
    environment = Environment(**kwargs)
    environment.reset(row)
    return environment


def test_the_right_answer_ends_it_at_once(row):
    turn = begun(row).step(f"I say <answer>{row.target}</answer>")
    assert turn == Turn(reward=1.0, done=True, answer=row.target)


def test_a_wrong_answer_may_be_tried_again_at_a_discount(row):
    environment = begun(row, discount=0.5, feedback="No.")
    assert environment.step("<answer>x</answer>") == Turn("No.")
    assert environment.step("<answer>y</answer>") == Turn("No.")
    assert environment.step(row.target) == Turn(reward=0.25, done=True, answer=row.target)


def test_the_last_attempt_ends_it(row):
    environment = begun(row, attempts=2)
    environment.step("x")
    turn = environment.step("y")
    assert (turn.done, turn.answer) == (True, "y")
    assert turn.reward < 0.1


def test_an_instance_can_begin_again(row):
    environment = begun(row, attempts=1)
    environment.step("x")
    environment.reset(row)
    assert environment.step(row.target).reward == 1.0


def test_no_attempts():
    with pytest.raises(ConfigError, match=r"environment.kwargs.attempts = 0"):
        Environment(attempts=0)


def test_a_row_of_no_task():
    environment = begun(Row(prompt="1+1", target="2", source="s", extra={}, seed=0))
    with pytest.raises(DataError, match="does not say which reasoning-gym task"):
        environment.step("2")
