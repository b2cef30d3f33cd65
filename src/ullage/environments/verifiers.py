"""Environments of the `verifiers` package (0.1): their own rollout, with our model behind its client.

Rows come from the environment's data set, written to a file; `docs/environments.md` shows how.
"""

import asyncio
import importlib
import json
from types import ModuleType
from typing import Any

from ullage.base.errors import ConfigError
from ullage.environments import Message, Row, Turn
from ullage.environments.tools import CALL


class Environment:
    """One rollout of a verifiers environment, halted wherever it asks the model."""

    def __init__(self, env_id: str, **env_args: Any) -> None:  # noqa: ANN401 -- its own arguments
        self.package = _package()
        self.environment = self.package.load_environment(env_id, **env_args)

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        tools = self.environment.tool_defs or []
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in tools
        ]

    def reset(self, row: Row) -> None:
        """Start the rollout; it halts before the first answer."""
        prompt = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        target = "" if row.target is None else row.target
        given = {"example_id": 0, **row.extra, "prompt": prompt, "answer": target}
        self.loop = asyncio.new_event_loop()
        self.asked: asyncio.Future[list[Any]] = self.loop.create_future()
        self.answered: asyncio.Future[Any] = self.loop.create_future()
        self.rollout = self.loop.create_task(self._played(given))
        self._run_until_asked()
        if self.rollout.done():
            raise RuntimeError(f"the environment ended before it began: {self.rollout.result().get('error')!r}")
        self.seen = len(self.asked.result())

    def step(self, action: str) -> Turn:
        """Answer, and let it go on until it asks again or is over."""
        self.asked = self.loop.create_future()
        answer, self.answered = self.answered, self.loop.create_future()
        answer.set_result(self._response(action))
        self._run_until_asked()
        if self.rollout.done():
            state = self.rollout.result()
            if state.get("error") is not None:
                raise RuntimeError(f"the environment failed: {state['error']!r}")
            return Turn(reward=float(state["reward"]), done=True)
        messages = self.asked.result()
        new, self.seen = messages[self.seen + 1 :], len(messages)  # after the answer itself
        return Turn([_plain(message) for message in new])

    async def _played(self, given: dict[str, Any]) -> Any:  # noqa: ANN401 -- verifiers' own state
        state = await self.environment.rollout(given, self._client(), "policy", {})
        await self.environment.rubric.score_rollout(state)
        return state

    def _run_until_asked(self) -> None:
        waiting = asyncio.wait({self.rollout, self.asked}, return_when=asyncio.FIRST_COMPLETED)
        self.loop.run_until_complete(waiting)

    def _client(self) -> Any:  # noqa: ANN401
        """A client of theirs that asks us; only `get_response` is ever called."""
        base = self.package.Client

        async def get_response(client: Any, prompt: list[Any], *_: Any, **__: Any) -> Any:  # noqa: ANN401
            self.asked.set_result(prompt)
            return await self.answered

        unused = dict.fromkeys(base.__abstractmethods__)
        return type("Policy", (base,), {**unused, "get_response": get_response})(None)

    def _response(self, text: str) -> Any:  # noqa: ANN401
        """The model's text as one of their responses, with its tool calls taken apart."""
        types = importlib.import_module("verifiers.types")
        calls = [call for found in CALL.findall(text) if (call := _call(found)) is not None]
        tool_calls = [types.ToolCall(id=str(index), **call) for index, call in enumerate(calls)]
        message = types.ResponseMessage(
            content=CALL.sub("", text) if tool_calls else text,
            tool_calls=tool_calls or None,
            finish_reason="tool_calls" if tool_calls else "stop",
            is_truncated=False,
        )
        return types.Response(id="", created=0, model="policy", message=message)


def _package() -> ModuleType:
    try:
        package = importlib.import_module("verifiers")
        if not hasattr(package, "load_environment"):
            raise ImportError(f"version {package.__version__} has another interface; 0.1 is needed")
    except ImportError as error:
        raise ConfigError(
            f"the environment 'verifiers' needs the package verifiers: {error}",
            "install it: pip install 'ullage[verifiers]'",
        ) from error
    return package


def _call(text: str) -> dict[str, str] | None:
    """Name and arguments of a tool call; None for what is not one."""
    try:
        call = json.loads(text)
        return {"name": str(call["name"]), "arguments": json.dumps(call["arguments"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _plain(message: Any) -> Message:  # noqa: ANN401 -- a dict, or their model of one
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    return {"role": message["role"], "content": content}
