"""The reasoning-gym reward on rows that went through JSON."""

import json

import pytest

from ullage.base.errors import ConfigError, DataError
from ullage.rewards.reasoning_gym import make_rows, score


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "countdown", "arc_agi", "sudoku"])
def test_oracle_answer_scores_one(task):
    for row in make_rows(task, size=2, seed=7):
        row = json.loads(json.dumps(row))
        assert row["source"] == task
        assert score(row["prompt"], row["answer"], row["answer"], extra=row) == 1.0
        assert score(row["prompt"], f"so <answer>{row['answer']}</answer>", row["answer"], extra=row) == 1.0
        assert score(row["prompt"], "no idea", row["answer"], extra=row) < 0.1


def test_rows_are_the_same_for_a_seed():
    assert make_rows("chain_sum", size=3, seed=1) == make_rows("chain_sum", size=3, seed=1)
    assert make_rows("chain_sum", size=3, seed=1) != make_rows("chain_sum", size=3, seed=2)


def test_config_reaches_the_task():
    rows = make_rows("chain_sum", size=5, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    assert {row["metadata"]["num_terms"] for row in rows} == {2}


def test_entry_may_be_a_column_or_text():
    row = make_rows("chain_sum", size=1, seed=7)[0]
    entry = {"question": row["prompt"], "answer": row["answer"], "metadata": row["metadata"]}
    for extra in (
        {"reasoning_gym": entry},
        {"reasoning_gym": json.dumps(entry)},
        {"metadata": json.dumps(row["metadata"])},
    ):
        assert score("", row["answer"], row["answer"], extra=extra) == 1.0


def test_task_without_stored_answer():
    row = make_rows("graph_color", size=1, seed=7)[0]
    assert row["answer"] == ""
    assert score(row["prompt"], "no idea", row["answer"], extra=row) == 0.0


def test_unknown_task_and_foreign_row_say_so():
    with pytest.raises(ConfigError, match=r"no task called 'sums'[\s\S]*chain_sum"):
        make_rows("sums", size=1, seed=1)
    with pytest.raises(DataError, match=r"metadata.source_dataset[\s\S]*make_rows"):
        score("", "1", "1", extra={})
