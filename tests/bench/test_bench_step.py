"""Whole steps in their small form; TRL's only where it is installed."""

import json

import pytest

from ullage.bench import step
from ullage.bench.step import RECIPES
from ullage.cli.main import main


@pytest.mark.parametrize("beside", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "beside TRL"])
def test_the_small_form_is_written_down(tmp_path, capfd, monkeypatch, beside):
    if beside:
        pytest.importorskip("trl")
    else:
        monkeypatch.setattr(step.importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "step.json"
    assert main(["bench", "step", "--out", str(out), "--json"]) == 0
    rows = json.loads(out.read_text())["step"]
    assert json.loads(capfd.readouterr().out) == {"step": rows}
    contenders = ["trl", "ullage"] if beside else ["ullage"]
    assert [(row["recipe"], row["contender"]) for row in rows] == [(r, c) for r in RECIPES for c in contenders]
    assert all(row["sequences"] == 4 and row["step_s"] > 0 for row in rows)


def test_an_unknown_shape_is_refused_before_anything_runs(capfd):
    assert main(["bench", "step", "--shapes", "9B"]) == 2
    assert "no shape 9B" in capfd.readouterr().err


def test_one_recipe_alone_and_an_unknown_one(tmp_path, capfd):
    out = tmp_path / "step.json"
    assert main(["bench", "step", "--recipes", "all bf16", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert {row["recipe"] for row in written["step"]} == {"all bf16"}
    assert written["command"] == "ullage bench step --shapes tiny --recipes 'all bf16'"
    assert main(["bench", "step", "--recipes", "int4"]) == 2
    assert "no recipe int4" in capfd.readouterr().err
