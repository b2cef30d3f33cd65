"""Many steps in a row, and steps whose passes are too large, in their small form."""

import json
from types import SimpleNamespace

import pytest
import torch

from ullage.bench.endurance import CASES, MIB, Held, endurance, planned_peak, summary
from ullage.bench.fit import case_config
from ullage.bench.replay import replay
from ullage.cli.main import main
from ullage.model.target import Target

CPU = Target("cpu", 0, (0, 0), 8 << 30)


def test_growth_is_counted_from_the_second_and_the_tenth_step():
    host = [100, 110, 111, 111, 111, 111, 111, 111, 111, 112, 130, 115]
    row = summary([Held(5 * MIB, 7 * MIB, value * MIB, 6 * MIB) for value in host])
    assert row["steps"] == 12
    assert row["host_mib"] == {"last": 115, "highest": 130, "growth_after_2": 5, "growth_after_10": 3}
    assert row["allocated_mib"] == {"last": 5, "highest": 5, "growth_after_2": 0, "growth_after_10": 0}
    assert row["peak_mib"] == {"last": 6, "highest": 6, "growth_after_2": 0, "growth_after_10": 0}
    assert "growth_after_10" not in summary([Held(0, 0, 0, 0)] * 10)["host_mib"]


def test_samples_of_many_lengths_are_trained_on():
    rows = list(endurance(CPU, steps=5, every=2))
    assert [row["steps"] for row in rows] == [2, 4, 5]
    assert rows[-1]["samples"] == 5 * 16
    assert (rows[-1]["shortest"], rows[-1]["longest"]) == (1, 8)


def test_the_planned_peak_is_claimed_before_growth_is_counted(monkeypatch):
    order = []

    def claim(target, planned):
        order.append(planned)
        return len(order) > 2

    def held(target, peak):
        order.append("held")
        return Held(0, 0, 0, peak)

    monkeypatch.setattr("ullage.bench.endurance.claim", claim)
    monkeypatch.setattr("ullage.bench.endurance.held", held)
    said = []
    rows = list(endurance(CPU, steps=4, every=3, say=said.append))
    planned = order[1]
    assert order == ["held", planned, "held", planned, "held", planned, "held"]
    assert [row["planned_mib"] for row in rows] == [round(planned / MIB, 2)] * 2
    assert said[1] == f"step 2: the device does not have the {planned / MIB:.1f} MiB that were planned"


def test_the_planned_peak_is_above_what_two_hundred_steps_needed():
    case = CASES["cuda"]
    planned = planned_peak(SimpleNamespace(case=case, config=case_config(case)))
    assert 8506 < planned / MIB < 1.05 * 8506  # MiB, on an H200


def test_a_training_that_runs_out_of_memory_finishes_in_smaller_passes():
    said = []
    fits, larger, repeated = replay(CPU, steps=2, say=said.append)
    assert (fits["budget_before"], fits["budget_after"], fits["replays"]) == (48, 48, 0)
    assert (larger["budget_before"], larger["budget_after"], larger["replays"]) == (72, 72, 0)
    assert (repeated["budget_before"], repeated["budget_after"], repeated["replays"]) == (72, 36, 1)
    assert [line.split(":")[0] for line in said] == ["update ran out of memory"]
    assert all(row["finished"] and row["weights_finite"] and row["steps"] == 2 for row in (fits, larger, repeated))


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures a real model there, for minutes")
def test_rows_are_written_as_they_come(tmp_path, monkeypatch, capfd):
    def rows(target, steps, say):
        yield {"training": "first", "steps": steps}
        raise KeyboardInterrupt

    monkeypatch.setattr("ullage.bench.replay.replay", rows)
    out = tmp_path / "update.json"
    assert main(["bench", "update", "--only", "replay", "--out", str(out)]) != 0
    assert json.loads(out.read_text())["replay"] == [{"training": "first", "steps": 3}]
    assert 'replay: {"training": "first", "steps": 3}' in capfd.readouterr().err
