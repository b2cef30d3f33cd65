"""The reasoning-gym reward on rows that went through JSON."""

import json

import pytest

from ullage.base.errors import DataError
from ullage.data.reasoning_gym_process import make_rows
from ullage.rewards.reasoning_gym import score


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "countdown", "arc_agi", "sudoku"])
def test_oracle_answer_scores_one(task):
    for row in make_rows(task, {"size": 2, "seed": 7}):
        assert score(row["prompt"], row["answer"], row["answer"], extra=row) == 1.0
        tagged = score(row["prompt"], f"so <answer> {row['answer']}</answer>", row["answer"], extra=row)
        assert (tagged, tagged.answer) == (1.0, row["answer"].strip())
        assert score(row["prompt"], "no idea", row["answer"], extra=row) < 0.1


def test_entry_may_be_a_column_or_text():
    (row,) = make_rows("chain_sum", {"size": 1, "seed": 7})
    entry = {"question": row["prompt"], "answer": row["answer"], "metadata": row["metadata"]}
    for extra in (
        {"reasoning_gym": entry},
        {"reasoning_gym": json.dumps(entry)},
        {"metadata": json.dumps(row["metadata"])},
    ):
        assert score("", row["answer"], row["answer"], extra=extra) == 1.0


def test_task_without_stored_answer():
    (row,) = make_rows("graph_color", {"size": 1, "seed": 7})
    assert row["answer"] == ""
    assert score(row["prompt"], "no idea", row["answer"], extra=row) == 0.0


def test_foreign_row_says_so():
    with pytest.raises(DataError, match=r"metadata.source_dataset[\s\S]*reasoning_gym:<task>"):
        score("", "1", "1", extra={})
