"""Tools: the model calls a calculator or a sandboxed Python and goes on with the result; a reply without a call ends.

A call is what Qwen and Hermes models write: `<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}
</tool_call>`, several in one reply if need be. Results come back as messages of the role `tool`. There is no reward
here: reward functions score the last reply.
"""

import json
import math
import re
import time
from collections.abc import Callable
from typing import Any

from ullage.base.errors import ConfigError
from ullage.environments import Message, Row, Turn
from ullage.environments._calculator import CannotCalculate, calculate
from ullage.environments._sandbox import Limits, Sandbox

MAX_CALLS = 8
"""In one reply; further ones are refused."""
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
TIME_SHARE = 0.8
"""Of a step's limit, for the programs of one reply; the rest is for starting and ending them."""

Tool = Callable[[str, float], tuple[str, bool]]
"""From the argument and the time when all calls end, to the result and whether the call succeeded."""

ARGUMENTS = {"calculator": "expression", "python": "code"}
DESCRIPTIONS = {
    "calculator": "The value of an arithmetic expression, such as (3 + 4) * 2 ** 10 or sqrt(2).",
    "python": "Runs a Python program and returns what it prints. Nothing is kept from one call to the next.",
}


class Environment:
    """An episode with tools."""

    def __init__(self, tools: list[str] | tuple[str, ...] = ("calculator",), python_seconds: float = 5.0) -> None:
        unknown = [name for name in tools if name not in ARGUMENTS]
        if unknown or not tools:
            named = ", ".join(map(str, unknown)) or "none"
            raise ConfigError(f"environment.kwargs.tools: unknown: {named}", f"there are: {', '.join(ARGUMENTS)}")
        number = isinstance(python_seconds, int | float) and not isinstance(python_seconds, bool)
        if not number or not 0 < python_seconds < math.inf:
            cause = f"environment.kwargs.python_seconds = {python_seconds!r}: must be a number above 0"
            raise ConfigError(cause, "give the seconds that one program may take, such as 5")
        self.reply_seconds = math.inf
        self.tools: dict[str, Tool] = {}
        if "calculator" in tools:
            self.tools["calculator"] = _calculator
        if "python" in tools:
            self.sandbox = Sandbox(Limits(seconds=python_seconds))
            self.tools["python"] = self._python

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [_schema(name) for name in self.tools]

    def reset(self, row: Row) -> None:
        """Nothing is remembered between replies."""
        self.reply_seconds = TIME_SHARE * row.seconds

    def step(self, action: str) -> Turn:
        """Carry out the calls of one reply."""
        calls = CALL.findall(action)
        if not calls:
            return Turn(done=True)
        deadline = time.monotonic() + self.reply_seconds
        results = [self._called(call, deadline) for call in calls[:MAX_CALLS]]
        if len(calls) > MAX_CALLS:
            results.append((f"Error: more than {MAX_CALLS} calls in one reply", False))
        messages: list[Message] = [{"role": "tool", "content": text.strip()} for text, _ in results]
        failed = sum(not succeeded for _, succeeded in results)
        return Turn(messages, metrics={"tool_calls": len(results), "failed_tool_calls": failed})

    def _called(self, call: str, deadline: float) -> tuple[str, bool]:
        """A result for everything a model may write: what is wrong with a call is told to it."""
        try:
            given = json.loads(call)
        except (ValueError, RecursionError):
            return "Error: the call is not valid JSON", False
        if not isinstance(given, dict) or not isinstance(given.get("arguments"), dict):
            return 'Error: a call is {"name": ..., "arguments": {...}}', False
        name = given.get("name")
        if not isinstance(name, str) or name not in self.tools:
            return f"Error: there is no such tool; there are: {', '.join(self.tools)}", False
        argument = given["arguments"].get(ARGUMENTS[name])
        if not isinstance(argument, str):
            return f"Error: {name} takes the text argument '{ARGUMENTS[name]}'", False
        return self.tools[name](argument, deadline)

    def _python(self, code: str, deadline: float) -> tuple[str, bool]:
        left = round(deadline - time.monotonic(), 1)  # no more of the clock than need be in what the model reads
        if left <= 0:
            together = f"all calls of one reply have {self.reply_seconds:g} s together"
            return f"Error: no time is left for it: {together}", False
        return self.sandbox.run(code, left)


def _calculator(expression: str, deadline: float) -> tuple[str, bool]:
    try:
        return calculate(expression), True
    except CannotCalculate as reason:
        return f"Error: {reason}", False


def _schema(name: str) -> dict[str, Any]:
    argument = ARGUMENTS[name]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": DESCRIPTIONS[name],
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
