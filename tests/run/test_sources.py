"""From the sources of the data: the sampler, the rewards that score them, and their full marks."""

import re
from collections import Counter
from pathlib import Path

import pytest

from ullage.base.errors import ConfigError
from ullage.config import yaml_reader
from ullage.config.load import load_mapping
from ullage.config.tree import Config
from ullage.data.curriculum import Curriculum
from ullage.data.mixture import Mixture
from ullage.data.prompts import Prompt
from ullage.data.sampler import Sampler, Walk
from ullage.run.sources import check_rewards, full_marks, make_sampler, refuse_unscored, sources_of

PROMPTS = [
    Prompt(id=row, token_ids=(5,), prompt="p", target="1", source=source, extra={})
    for row, source in enumerate(["words", "sums", "words", "sums"])
]


def config(*functions, **sections):
    return Config.model_validate({"reward": {"functions": list(functions)}, **sections})


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({}, Sampler),
        ({"curriculum": True}, Curriculum),
        ({"mixing_weights": {"sums": 1, "words": 1}}, Mixture),
        ({"mixing_weights": {"sums": 1, "words": 1}, "curriculum": True}, Mixture),
    ],
)
def test_the_sampler_that_the_config_asks_for(data, kind):
    sampler = make_sampler(config(data={"train_batch_size": 2, "seed": 9, "shuffle": False, **data}), PROMPTS)
    assert type(sampler) is kind
    assert sampler.seed == 9
    if kind is Mixture:
        assert sampler.rows == {"words": [0, 2], "sums": [1, 3]}
        assert {type(part) for part in sampler.parts.values()} == {Curriculum if "curriculum" in data else Walk}
        assert sampler.next_batch() == [1, 0]  # in the order of the weights


def test_the_seed_is_the_runs_where_the_data_has_none():
    assert make_sampler(config(data={"train_batch_size": 2}, trainer={"seed": 5}), PROMPTS).seed == 5


def test_sources_in_the_order_of_the_data():
    assert sources_of(PROMPTS) == ["words", "sums"]


def test_a_reward_for_an_unknown_source():
    given = config({"name": "gsm8k"}, {"name": "format", "sources": ["sums", "wrods"]})
    with pytest.raises(ConfigError) as caught:
        check_rewards(given, ["words", "sums"])
    assert caught.value.cause == "reward.functions[1].sources: no prompt is of the source 'wrods'"
    assert caught.value.remedy == "did you mean 'words'? The data has words, sums"
    refuse_unscored(given, ["words"])  # data of fewer sources may be evaluated


def test_a_source_without_a_reward():
    given = config({"name": "gsm8k", "sources": ["sums"]})
    check_rewards(given, ["sums"])
    with pytest.raises(ConfigError) as caught:
        check_rewards(given, ["sums", "words"])
    assert caught.value.cause == "no reward function scores the source(s) words"
    assert caught.value.remedy.startswith("name each in the sources of one of reward.functions")


@pytest.mark.parametrize("others", [{"reward_model": {"enable": True}}, {"environment": {"name": "tools"}}])
def test_a_source_may_go_without_where_something_else_scores(others):
    check_rewards(config({"name": "gsm8k", "sources": ["sums"]}, **others), ["sums", "words"])


def test_full_marks_are_the_weights_that_apply_without_penalties():
    functions = (
        {"name": "gsm8k", "sources": ["sums"], "weight": 2.0},
        {"name": "format", "weight": 0.5},
        {"path": "own.py", "name": "repetition", "sources": ["words"], "weight": -1.0},
        {"name": "length", "weight": 3.0},  # from -1 to 0
    )
    assert full_marks(config(*functions), ["sums", "words"]) == {"sums": 2.5, "words": 0.5}
    given = config(functions[0], environment={"name": "tools"})
    assert full_marks(given, ["sums", "words"]) == {"sums": 2.0, "words": 1.0}
    assert full_marks(config(*functions, reward_model={"enable": True}), ["sums"]) == {}


def test_a_curriculum_needs_answers_that_can_succeed():
    both = {"data": {"curriculum": True}, "reward_model": {"enable": True, "model": {"path": "judge"}}}
    with pytest.raises(ConfigError, match=r"data\.curriculum = true: a reward model's score has no highest"):
        load_mapping(both)


def snippets():
    """The config snippets of the page about data."""
    page = Path(__file__).parents[2] / "docs" / "data.md"
    return re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_the_snippets_of_the_page_do_what_it_says():
    columns, answers, tasks, curriculum = (yaml_reader.read_text(text, "docs/data.md") for text in snippets())
    assert load_mapping(columns).config.data.columns == {"prompt": "task.text", "target": "task.result"}
    assert load_mapping(curriculum).config.data.curriculum
    supervised = load_mapping(answers).config
    assert (supervised.algorithm.name, supervised.data.columns) == ("sft", {"completion": "answer"})

    given = load_mapping(tasks).config
    names = [name for name in ("gsm8k", "stories", "leg_counting") for _ in range(100)]
    prompts = [
        Prompt(id=row, token_ids=(5,), prompt="p", target="1", source=name, extra={}) for row, name in enumerate(names)
    ]
    check_rewards(given, sources_of(prompts))
    assert full_marks(given, sources_of(prompts)) == {"gsm8k": 1.0, "stories": 1.0, "leg_counting": 1.0}
    sampler = make_sampler(given, prompts)
    for _ in range(4):
        drawn = Counter(names[row] for row in sampler.next_batch())
        assert drawn == {"gsm8k": 32, "stories": 16, "leg_counting": 16}
