"""Rows of reasoning-gym tasks, made in a real process of their own."""

import subprocess
import sys
from itertools import islice
from pathlib import Path

import psutil
import pytest

from ullage.base.errors import DataError
from ullage.config.tree import Data
from ullage.data.generated import parse
from ullage.data.prompts import load_prompts
from ullage.data.readers import read_rows
from ullage.data.reasoning_gym_process import Unusable, make_rows


def values(file):
    return [row.values for row in read_rows(file)]


def refusal(task, **options):
    with pytest.raises(Unusable) as caught:
        list(make_rows(task, {"size": 1, "seed": 0} | options))
    return caught.value.args


def test_rows_of_a_task_become_prompts(tokenizer):
    file = "reasoning_gym:chain_sum:size=3:min_terms=2:max_terms=2:min_digits=1:max_digits=1"
    loaded = load_prompts([file], Data(max_prompt_length=200), tokenizer)
    assert len(loaded.prompts) == 3
    for prompt in loaded.prompts:
        assert prompt.source == "chain_sum"
        assert prompt.extra["metadata"]["source_dataset"] == "chain_sum"
        first, sign, second = prompt.prompt.partition(": ")[2].removesuffix(" =").split()
        assert int(prompt.target) == int(first) + (int(second) if sign == "+" else -int(second))


def test_rows_do_not_depend_on_the_process(monkeypatch):
    """This task draws words from a set, whose order is another in every interpreter unless the hash seed is fixed."""
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = values("reasoning_gym:ransom_note:size=2")
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert values("reasoning_gym:ransom_note:size=2") == first


def test_neighbouring_seeds_share_no_rows():
    train, held_out = (
        {row["prompt"] for row in make_rows(*parse(f"reasoning_gym:sudoku:size=4:seed={seed}"))} for seed in (0, 1)
    )
    assert len(train) == len(held_out) == 4
    assert not train & held_out


def test_only_the_rows_that_are_wanted_are_made_and_nothing_is_printed(capfd):
    """This task prints dots while it works."""
    rows = read_rows("reasoning_gym:bf:size=1000000000:difficulty=2")
    assert [row.where.partition(", ")[2] for row in islice(rows, 2)] == ["row 1", "row 2"]
    (child,) = [one for one in psutil.Process().children() if "reasoning_gym_process.py" in " ".join(one.cmdline())]
    rows.close()
    assert not child.is_running()
    assert capfd.readouterr() == ("", "")


def test_a_refusal_names_the_data():
    with pytest.raises(DataError) as caught:
        values("reasoning_gym:leg_cuonting")
    assert caught.value.cause == "reasoning_gym:leg_cuonting: reasoning-gym has no task called 'leg_cuonting'"
    assert caught.value.remedy == "did you mean leg_counting?"


def test_a_process_that_dies_is_told(monkeypatch, tmp_path):
    killed = tmp_path / "python"
    killed.write_text('#!/bin/sh\necho \'{"row": {"prompt": "a"}}\'\nkill -9 $$\n')
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    with pytest.raises(DataError, match="ended after 1 of them, with code -9"):
        values("reasoning_gym:chain_sum:size=2")


def test_options_that_a_task_does_not_take():
    known = "it takes: min_animals, max_animals, min_instances, max_instances, seed, size"
    assert refusal("leg_counting", legs=4) == ("the task has no option 'legs'", known)
    cause = "the task refuses its options: max_animals must be >= min_animals"
    assert refusal("leg_counting", max_animals=2) == (cause, known)
    cause, remedy = refusal("nothing_like_it")
    assert cause == "reasoning-gym has no task called 'nothing_like_it'"
    assert remedy.startswith("it has: ab, acre, ")


def test_missing_package_names_the_extra():
    script = Path(sys.modules[make_rows.__module__].__file__)
    program = f"""
import runpy, sys
sys.modules["reasoning_gym"] = None
sys.argv = ["", "chain_sum", '{{"size": 1, "seed": 0}}']
runpy.run_path({str(script)!r}, run_name="__main__")
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "needs the package reasoning-gym" in output
    assert "pip install 'ullage[reasoning-gym]'" in output


def test_options_are_json_or_text():
    task, options = parse('reasoning_gym:a:size=7:flag=true:ratio=0.5:operators=["+","-"]:style=plain')
    seed = options.pop("seed")
    assert (task, options) == (
        "a",
        {"size": 7, "flag": True, "ratio": 0.5, "operators": ["+", "-"], "style": "plain"},
    )
    assert 0 <= seed < 2**31
    assert parse("reasoning_gym:a") == parse("reasoning_gym:a:seed=0:size=500") == ("a", {"size": 500, "seed": seed})


@pytest.mark.parametrize(
    ("file", "cause"),
    [
        ("reasoning_gym", "names no task"),
        ("reasoning_gym:", "names no task"),
        ("reasoning_gym:a:train", "'train' is not an option"),
        ("reasoning_gym:a:size=0", "size is 0"),
        ("reasoning_gym:a:size=many", "size is 'many'"),
        ("reasoning_gym:a:seed=true", "seed is True"),
    ],
)
def test_names_that_are_wrong(file, cause):
    with pytest.raises(DataError) as caught:
        values(file)
    assert caught.value.cause == f"{file}: {cause}"


def test_a_file_of_that_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("reasoning_gym:rows.jsonl").write_text('{"prompt": "a"}')
    assert values("reasoning_gym:rows.jsonl") == [{"prompt": "a"}]
