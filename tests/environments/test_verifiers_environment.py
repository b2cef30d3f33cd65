"""The adapter for verifiers: against a module of its interface and, where it is installed, against the package."""

import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest

from ullage.base.errors import ConfigError
from ullage.config.tree import Config
from ullage.environments import Row, Turn
from ullage.environments._pool import EnvironmentPool
from ullage.environments.verifiers import Environment

# What the adapter uses of verifiers 0.1: the loader, the client it is asked through, responses, rollout and rubric.
STAND_IN = """
import abc, importlib, sys, types as _types

def load_environment(env_id, **arguments):
    return importlib.import_module(env_id.replace("-", "_")).load_environment(**arguments)

class Client(abc.ABC):
    def __init__(self, client): self.client = client
    @abc.abstractmethod
    def setup_client(self, config): ...
    @abc.abstractmethod
    async def close(self): ...
    async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs): raise NotImplementedError

class Record(_types.SimpleNamespace):
    def __getitem__(self, key): return getattr(self, key)

types = sys.modules["verifiers.types"] = _types.ModuleType("verifiers.types")
types.ToolCall = types.ResponseMessage = types.Response = Record

class Rubric:
    def __init__(self, funcs): self.funcs = funcs
    async def score_rollout(self, state): state["reward"] = sum(f(state=state) for f in self.funcs)

class MultiTurnEnv:
    tool_defs = None
    def __init__(self, rubric, max_turns=-1): self.rubric, self.max_turns = rubric, max_turns
    async def setup_state(self, state): ...
    async def rollout(self, input, client, model, sampling_args):
        state = {**input, "turns": 0, "final_env_response": None, "error": None}
        messages = list(input["prompt"])
        await self.setup_state(state)
        while state["turns"] < self.max_turns:
            response = await client.get_response(messages, model, sampling_args, tools=None)
            state["turns"] += 1
            messages = [*messages, {"role": "assistant", "content": response.message.content}]
            try:
                heard = await self.env_response(messages, state)
            except LookupError as error:
                state["error"] = error
                return state
            if state["final_env_response"] is not None: break
            messages = [*messages, *heard]
        return state
"""

# Written for either: the real package takes the same class.
GAME = """
import verifiers as vf

class Game(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["won"] = False

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"].strip()
        if said == "break":
            raise LookupError("broken")
        if said == str(state["answer"]):
            state["won"] = True
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return []
        return [{"role": "user", "content": f"not {said}"}]

def won(state, **kwargs):
    return 2.0 * state["won"]

def load_environment(turns):
    options = {}
    if hasattr(vf, "__version__"):
        from datasets import Dataset
        options["dataset"] = Dataset.from_list([{"question": "?", "answer": "5"}])
    return Game(rubric=vf.Rubric(funcs=[won]), max_turns=turns, **options)
"""

ROW = Row(prompt=[{"role": "user", "content": "?"}], target="5", source="s", extra={"example_id": 0}, seed=0)
INSTALLED = importlib.util.find_spec("verifiers") is not None


@pytest.fixture(scope="module", params=["stand-in", "verifiers"])
def pool(request, tmp_path_factory):
    if request.param == "verifiers" and not INSTALLED:
        pytest.skip("verifiers is not installed")
    folder = tmp_path_factory.mktemp("game")
    if request.param == "stand-in":
        (folder / "verifiers.py").write_text(STAND_IN)
    (folder / "little_game.py").write_text(GAME)
    environment = {"name": "verifiers", "kwargs": {"env_id": "little-game", "turns": 4}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        made = EnvironmentPool(Config.model_validate({"environment": environment, "reward": {"num_workers": 1}}))
    yield made
    made.close()


def played(pool, *actions, row=ROW):
    """What became of each action."""
    episode = pool.reset(row)
    for action in actions:
        pool.step(episode, action)
    begun, *results = pool.collect()
    assert begun == (episode, None, None)
    return [turn or error for _, turn, error in results]


def test_observations_and_the_rubrics_score(pool):
    assert played(pool, "7", " 6", "5") == [
        Turn([{"role": "user", "content": "not 7"}]),
        Turn([{"role": "user", "content": "not 6"}]),
        Turn(reward=2.0, done=True),
    ]


def test_a_target_of_zero_is_one(pool):
    row = Row(prompt="?", target=0, source="s", extra={}, seed=0)
    assert played(pool, "1", "0", row=row) == [
        Turn([{"role": "user", "content": "not 1"}]),
        Turn(reward=2.0, done=True),
    ]


def test_its_own_limit_of_turns(pool):
    assert played(pool, "1", "2", "3", "4")[-1] == Turn(reward=0.0, done=True)


def test_its_failure_costs_the_episode(pool):
    (error,) = played(pool, "break")
    assert "broken" in error


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match="needs the package verifiers") as refused:
        Environment("little-game")
    assert refused.value.remedy == "install it: pip install 'ullage[verifiers]'"


def test_a_version_with_another_interface(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(__version__="0.4.0"))
    with pytest.raises(ConfigError, match=r"version 0\.4\.0 has another interface; 0\.1 is needed"):
        Environment("little-game")


def test_tool_calls_of_the_model_are_taken_apart(monkeypatch):
    types = SimpleNamespace(ToolCall=SimpleNamespace, ResponseMessage=SimpleNamespace, Response=SimpleNamespace)
    loaded = SimpleNamespace(
        tool_defs=[SimpleNamespace(name="add", description="Adds.", parameters={"type": "object"})]
    )
    package = SimpleNamespace(load_environment=lambda name: loaded)
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.setitem(sys.modules, "verifiers.types", types)
    environment = Environment("little-game")
    text = 'Look: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{broken</tool_call>'
    message = environment._response(text).message
    assert message.content == "Look: "
    assert message.tool_calls == [SimpleNamespace(id="0", name="add", arguments='{"a": 1}')]
    assert environment._response("plain").message.tool_calls is None
    unclosed = environment._response(text.partition("</tool_call>")[0]).message
    assert (unclosed.content, unclosed.tool_calls) == ("Look: ", message.tool_calls)
    assert environment.tool_schemas == [
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
    ]
