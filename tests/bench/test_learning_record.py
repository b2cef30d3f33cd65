"""benchmarks/learning.py: right answers to its word problems, and a record of a real run, small."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from ullage.rewards.gsm8k import score

FILE = Path(__file__).parent.parent.parent / "benchmarks" / "learning.py"


@pytest.fixture(scope="module")
def learning():
    spec = importlib.util.spec_from_file_location("learning", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_word_problems_have_one_side_and_right_answers(learning):
    train, held_out = learning.word_problems(1)
    assert (len(train), len(held_out)) == (learning.TRAINED, learning.HELD_OUT)
    assert len({row["prompt"] for row in train + held_out}) == len(train) + len(held_out)
    assert learning.word_problems(1) == (train, held_out)
    assert learning.word_problems(2)[1] != held_out
    kinds = set()
    for row in train + held_out:
        working, result, marked = re.fullmatch(r"([\d +*-]+) = (\d+)\. #### (\d+)", row["answer"]).groups()
        assert result == marked
        assert worked_out(working) == int(result) > 0
        assert score("", row["answer"], row["answer"]) == 1.0
        story = row["prompt"].rpartition("Question: ")[2]
        numbers = [int(number) for number in re.findall(r"\d+", story)]
        assert sorted(numbers) == sorted(int(number) for number in re.findall(r"\d+", working))
        kinds.add((re.sub(r"\d+", "", working), len(numbers)))
    assert len(kinds) == 5, "two kinds add two numbers"


def worked_out(working):
    """`a + b - c` or `a * b + c`, from left to right."""
    first, *rest = working.split(" ")
    total = int(first)
    for sign, number in zip(rest[::2], map(int, rest[1::2]), strict=True):
        total = {"+": total + number, "-": total - number, "*": total * number}[sign]
    return total


def test_a_record_and_its_picture(learning, tiny_model, tmp_path, capsys):
    out = tmp_path / "cpu.json"
    learning.record("demo", str(tiny_model), "auto", seed=3, steps=2, out=out)
    assert f"{out}: accuracy " in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [row["step"] for row in found["steps"]] == [1, 2]
    assert all(0 <= row["reward"] <= 1 and row["held_bytes"] > 0 for row in found["steps"])
    assert set(found["memory_bytes"]) == {"step_2"}
    assert found["samples_each"] == 4
    assert found["config"]["trainer"] == {"total_training_steps": 2, "seed": 3}
    assert str(tmp_path) not in out.read_text()
    assert str(tiny_model) not in out.read_text()
    learning.draw([found, found | {"hardware": {"gpu": "NVIDIA H200"}}], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
