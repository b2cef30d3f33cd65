"""Loading reward functions and detecting their signatures."""

import doctest
import importlib
from pathlib import Path

import pytest

import ullage.rewards
from ullage.base.errors import ConfigError
from ullage.rewards.results import Result, UnusableResult
from ullage.rewards.signatures import BUILT_IN, load

REQUEST = {
    "prompt": "2 + 2?",
    "response": "4",
    "target": "4",
    "source": "sums",
    "extra": {"level": 3},
    "response_length": 1,
    "response_ids": [19],
}


def loaded(tmp_path, source, name="", **kwargs):
    path = tmp_path / "my_reward.py"
    path.write_text(source)
    return load(str(path), name, kwargs)


@pytest.mark.parametrize(
    ("source", "kind", "score"),
    [
        ("def score(prompt, response, target): return float(response == target)", "plain", 1.0),
        ("def score(response): return len(response)", "plain", 1.0),
        ("def score(*, target, response, extra): return extra['level']", "plain", 3.0),
        ("def score(response, **kwargs): return sorted(kwargs) == "
         "['extra', 'prompt', 'response_length', 'source', 'target']", "plain", 1.0),
        ("def score(response_length, source): return response_length + len(source)", "plain", 5.0),
        ("async def score(prompt, response, target): return 0.5", "plain", 0.5),
        ("def compute_score(data_source, solution_str, ground_truth, extra_info=None): "
         "return (data_source, solution_str, ground_truth, extra_info['level']) == ('sums', '4', '4', 3)", "verl", 1.0),
        ("def compute_score(solution_str, ground_truth): return 2", "verl", 2.0),
        ("def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs): return len(kwargs)",
         "verl", 0.0),
        ("async def compute_score(data_source, solution_str, ground_truth, extra_info): return {'score': 0.5}",
         "verl", 0.5),
        ("def f(prompts, completions, **kwargs): return [float((prompts, completions) == (['2 + 2?'], ['4']))]",
         "TRL", 1.0),
        ("def f(completions, level, **kwargs): return [level[0]]", "TRL", 3.0),
        ("def f(completions, answer, solution, ground_truth): return [a == '4' for a in answer]", "TRL", 1.0),
        ("async def f(completions, **kwargs): return [0.5 for _ in completions]", "TRL", 0.5),
        ("def f(completion_ids, **kwargs): return [float(sum(ids)) for ids in completion_ids]", "TRL", 19.0),
    ],
)  # fmt: skip
def test_signature_is_detected_and_called(tmp_path, source, kind, score):
    reward = loaded(tmp_path, source)
    assert reward.signature.kind == kind
    assert f", {kind} signature (" in reward.description
    assert reward.score(REQUEST) == Result(score, {})


def test_trl_gets_conversations_where_the_prompt_is_one(tmp_path):
    reward = loaded(
        tmp_path,
        "def f(prompts, completions, **kwargs):\n"
        "    assert prompts == [[{'role': 'user', 'content': 'hi'}]]\n"
        "    return [float(completion == [{'role': 'assistant', 'content': '4'}]) for completion in completions]\n",
    )
    assert reward.score({**REQUEST, "prompt": [{"role": "user", "content": "hi"}]}).score == 1.0


def test_verl_gets_its_own_extra_info(tmp_path):
    reward = loaded(tmp_path, "def f(solution_str, ground_truth, extra_info): return extra_info['index']")
    assert reward.score({**REQUEST, "extra": {"extra_info": {"index": 7}, "ability": "math"}}).score == 7.0


def test_trl_column_that_the_data_lacks(tmp_path):
    reward = loaded(tmp_path, "def f(completions, difficulty): return [1.0]")
    with pytest.raises(UnusableResult, match="needs the column 'difficulty'; the row has level"):
        reward.score(REQUEST)


def test_kwargs_of_the_config_win_over_a_column(tmp_path):
    reward = loaded(
        tmp_path, "def f(completions, level, **kwargs): return [level + kwargs['bonus']]", level=10, bonus=1
    )
    assert reward.score(REQUEST).score == 11.0


@pytest.mark.parametrize(
    ("source", "chosen"),
    [
        ("def other(response): return 0\ndef score(response): return 1", "score in my_reward.py"),
        ("def other(response): return 0\ndef compute_score(solution_str): return 1", "compute_score in my_reward.py"),
        ("from os.path import join\ndef _private(a): ...\ndef only(response): return 1", "only in my_reward.py"),
    ],
)
def test_function_of_a_file_is_chosen(tmp_path, source, chosen):
    assert loaded(tmp_path, source).where == chosen


def test_label_is_the_file_where_the_function_has_a_general_name(tmp_path):
    assert loaded(tmp_path, "def score(response): return 1").label == "my_reward"
    assert loaded(tmp_path, "def brevity(response): return 1").label == "brevity"


def test_callable_object_is_accepted(tmp_path):
    source = "class C:\n    def __call__(self, response): return 0.25\njudge = C()\n"
    assert loaded(tmp_path, source, name="judge").score(REQUEST).score == 0.25


@pytest.mark.parametrize(
    ("source", "name", "kwargs", "text"),
    [
        ("def f(a, b): return 1", "", {}, r"unknown signature: \(a, b\)[\s\S]*score\(prompt, response, target\)"
         r"[\s\S]*verl's f\(data_source[\s\S]*TRL's f\(prompts"),
        ("def f(**kwargs): return 1", "", {}, "unknown signature"),
        ("def f(response, /): return 1", "", {}, "unknown signature"),
        ("def f(response, words): return 1", "", {}, "needs the argument 'words'[^\n]*\nset kwargs.words"),
        ("def f(solution_str, words): return 1", "", {}, "needs the argument 'words'"),
        ("def f(response): return 1", "", {"limit": 1}, "no argument 'limit', which kwargs gives\nit takes: none"),
        ("def f(response, limit=1): return 1", "", {"limits": 1}, "it takes: limit"),
        ("def f(response, **kwargs): return 1", "", {"target": 1}, "kwargs.target: every call sets it"),
        ("def f(response): ...\ndef g(response): ...", "", {}, "set name; the functions in it are: f, g"),
        ("x = 1", "", {}, "the functions in it are: none"),
        ("def f(response): ...", "h", {}, "no function called 'h'\nthe functions in it are: f"),
        ("def f(:", "", {}, r"raised SyntaxError: .*\(my_reward.py, line 1\)"),
        ("import os\nimport no_such_module", "", {}, "raised ModuleNotFoundError: .* at my_reward.py:2"),
        ("import sys\nsys.exit(3)", "", {}, "raised SystemExit: 3 at my_reward.py:2"),
    ],
)  # fmt: skip
def test_file_that_cannot_be_used(tmp_path, source, name, kwargs, text):
    with pytest.raises(ConfigError, match=text):
        loaded(tmp_path, source, name, **kwargs)


@pytest.mark.parametrize(
    ("path", "name", "text"),
    [
        (None, "", "neither path nor name"),
        (None, "gsm8", "no reward called 'gsm8'\ndid you mean gsm8k"),
        (None, "my_reward.py", "a Python file goes under path"),
        (None, "no.such.thing", "no.such.thing cannot be imported: it raised ModuleNotFoundError"),
        (None, "os.path.no_function", "raised AttributeError"),
        (None, "length", "the reward length needs the argument 'max_length'"),
        ("missing.py", "", "no such Python file"),
        ("reward.txt", "", "ends in .py"),
    ],
)
def test_name_that_cannot_be_used(path, name, text):
    with pytest.raises(ConfigError, match=text):
        load(path, name, {})


def test_dotted_name(tmp_path, monkeypatch):
    (tmp_path / "reward_package_for_test.py").write_text("def closeness(response, target): return 0.5")
    monkeypatch.syspath_prepend(tmp_path)
    reward = load(None, "reward_package_for_test.closeness", {})
    assert reward.score(REQUEST).score == 0.5
    assert reward.description == ("closeness: reward_package_for_test.closeness, plain signature (response, target)")


def test_every_reward_of_the_room_is_listed():
    folder = Path(ullage.rewards.__file__).parent
    files = {path.stem for path in folder.glob("*.py") if "\ndef score(" in path.read_text()}
    assert files == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_rewards_load_and_their_examples_hold(name):
    kwargs = {"max_length": 10} if name == "length" else {}
    assert load(None, name, kwargs).description.startswith(
        f"{name}: built in, plain signature (prompt, response, target"
    )
    outcome = doctest.testmod(importlib.import_module(f"ullage.rewards.{name}"))
    assert (outcome.failed, outcome.attempted >= 2) == (0, True)
