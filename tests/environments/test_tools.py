"""The tools environment: what a model may write as a call, and what it reads in return."""

import json

import pytest

from ullage.base.errors import ConfigError
from ullage.environments import Row, Turn, tools
from ullage.environments._sandbox import Unavailable, bubblewrap_command, run, sandlock_command
from ullage.environments.tools import Environment


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def result(*contents, failed=0):
    messages = [{"role": "tool", "content": content} for content in contents]
    return Turn(messages, metrics={"tool_calls": len(contents), "failed_tool_calls": failed})


@pytest.fixture
def environment():
    made = Environment()
    made.reset(Row(prompt="", target=None, source="", extra={}, seed=0))
    return made


def test_a_reply_without_a_call_ends_the_episode(environment):
    assert environment.step("The answer is 42.") == Turn(done=True)


def test_calls_are_answered_in_their_order(environment):
    reply = f"Let me see. {call('calculator', expression='6*7')} and {call('calculator', expression='2**3')}"
    assert environment.step(reply) == result("42", "8")


def test_a_call_whose_end_was_forgotten(environment):
    assert environment.step(call("calculator", expression="1+1").removesuffix("</tool_call>")) == result("2")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("<tool_call>{nonsense</tool_call>", "Error: the call is not valid JSON"),
        ("<tool_call></tool_call>", "Error: the call is not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "Error: the call is not valid JSON"),
        ("<tool_call>[1]</tool_call>", 'Error: a call is {"name": ..., "arguments": {...}}'),
        ('<tool_call>{"name": "calculator"}</tool_call>', 'Error: a call is {"name": ..., "arguments": {...}}'),
        (call("browser", url="x"), "Error: there is no such tool; there are: calculator"),
        (
            '<tool_call>{"name": ["calculator"], "arguments": {}}</tool_call>',
            "Error: there is no such tool; there are: calculator",
        ),
        (call("python", code="1"), "Error: there is no such tool; there are: calculator"),
        (call("calculator", code="1"), "Error: calculator takes the text argument 'expression'"),
        (call("calculator", expression=7), "Error: calculator takes the text argument 'expression'"),
        (call("calculator", expression="1/0"), "Error: division by zero"),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(environment, reply, error):
    assert environment.step(reply) == result(error, failed=1)


def test_too_many_calls_in_one_reply(environment):
    turn = environment.step(call("calculator", expression="1") * 20)
    assert turn == result(*["1"] * 8, "Error: more than 8 calls in one reply", failed=1)


def test_tools_are_described_as_templates_take_them():
    (schema,) = Environment(["calculator"]).tool_schemas
    assert schema["type"] == "function"
    assert schema["function"]["name"] == "calculator"
    assert schema["function"]["parameters"] == {
        "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]
    }  # fmt: skip


@pytest.mark.parametrize("given", [["browser"], [], ["calculator", 3]])
def test_tools_that_are_not_there(given):
    with pytest.raises(ConfigError, match=r"environment\.kwargs\.tools: unknown") as refused:
        Environment(given)
    assert refused.value.remedy == "there are: calculator, python"


def any_sandbox():
    for command in (bubblewrap_command, sandlock_command):
        try:
            if run(command, "print(1)", tools.Limits())[1]:
                return True
        except Unavailable:
            continue
    return False


def test_python():
    if not any_sandbox():
        pytest.skip("no sandbox works on this machine")
    environment = Environment(["python"], python_seconds=0.5)
    assert environment.step(call("python", code="print(sum(range(10)))")) == result("45")
    assert environment.step(call("python", code="while True: pass")) == result("Error: timeout after 0.5 s", failed=1)
    turn = environment.step(call("python", code="open('/etc/shadow')"))
    assert turn.metrics["failed_tool_calls"] == 1
    assert turn.observation[0]["content"].startswith("Traceback")


def test_the_calls_of_one_reply_share_its_time():
    """Eight endless programs, each of which may take half a second: the reply takes less than its limit, not four."""
    if not any_sandbox():
        pytest.skip("no sandbox works on this machine")
    environment = Environment(["calculator", "python"], python_seconds=0.5)
    environment.reset(Row(prompt="", target=None, source="", extra={}, seed=0, seconds=0.75))
    endless = call("python", code="while True: pass")
    late = "Error: no time is left for it: all calls of one reply have 0.6 s together"
    first, second, *others, last = environment.step(endless * 7 + call("calculator", expression="1")).observation
    assert first["content"] == "Error: timeout after 0.5 s"
    assert second["content"] in (late, "Error: timeout after 0.1 s")
    assert {other["content"] for other in others} == {late}
    assert last["content"] == "1"
    again = environment.step(endless)
    assert again == result("Error: timeout after 0.5 s", failed=1)


@pytest.mark.parametrize("seconds", [0, -1, "5", None, float("nan"), float("inf"), True])
def test_a_time_that_is_none(seconds):
    with pytest.raises(ConfigError, match=r"environment\.kwargs\.python_seconds = .*: must be a number above 0"):
        Environment(["python"], python_seconds=seconds)
