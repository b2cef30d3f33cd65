"""The memory benchmark: predictions come first, the file survives being cut off, and a bench goes on where it was."""

import json
from types import SimpleNamespace

import pytest
import torch

from ullage.base.errors import UsageError, WriteError
from ullage.bench import memory
from ullage.bench.memory import Phases, start
from ullage.bench.memory_records import Records, provenance
from ullage.cli.main import main
from ullage.model.target import Target
from ullage.run.traced_plan import stand_in_of

CPU = Target("cpu", 0, (0, 0), 8 << 30)
LEAST = 1000


def fake_trace(draw, gpu):
    return SimpleNamespace(phases={"update": 900, "rollout": 300}, least_bytes=LEAST, host_bytes=2000)


class Steps:
    """Stands in for real steps: remembers them, and runs out of memory where it is told to."""

    def __init__(self, fails=()):
        self.seen, self.fails = [], fails

    def __call__(self, draw, target, phases):
        self.seen.append(draw.number)
        with phases("rollout"):
            pass
        with phases("update"):
            if draw.number in self.fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")


def bench(path, steps=None, **options):
    made = start(path, CPU, count=options.get("count", 3), seed=options.get("seed", 5), gpu=None)
    made.predictor, made.rehearse = fake_trace, steps or Steps()
    return made


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "cleared", lambda target: None)  # steps that are not real leave nothing behind
    return tmp_path / "results" / "memory.jsonl"


def test_the_draw_is_written_before_the_predictions_and_those_before_the_measurements(path):
    made = bench(path)
    assert [row["kind"] for row in lines(path)] == ["drawn"]
    assert made.predict()
    assert made.measure(CPU)
    assert made.caps(CPU, 1)
    rows = lines(path)
    assert [row["kind"] for row in rows] == ["drawn", *["predicted"] * 3, *["measured"] * 3, "cap", "cap"]
    assert rows[0]["seed"] == 5
    assert rows[0]["configs"][1] == [made.configs[1].model, dict(made.configs[1].settings)]
    assert rows[1]["trace"] == {"update": 900, "rollout": 300}
    assert {row["code"] for row in rows} == {provenance()["code"]}
    assert [(row["factor"], row["cap_bytes"]) for row in rows[-2:]] == [(1.03, 1030), (0.97, 970)]


def test_nothing_is_measured_without_a_prediction(path):
    steps = Steps()
    made = bench(path, steps)
    made.predictor = lambda draw, gpu: fake_trace(draw, gpu) if draw.number == 1 else 1 / 0
    made.predict()
    assert made.failures == [f"predict {number}: ZeroDivisionError: division by zero" for number in (0, 2)]
    made.failures.clear()
    assert made.measure(CPU)
    assert steps.seen == [1]
    assert made.failures == ["measure 0: it has no prediction", "measure 2: it has no prediction"]
    assert [row["kind"] for row in lines(path)] == ["drawn", "predicted", "measured"]


def test_no_cap_without_a_measurement_and_none_for_a_config_that_ran_out(path):
    made = bench(path, Steps(fails=(0, 1, 2)))
    made.predict()
    made.caps(CPU, 1)
    (told,) = made.failures
    assert told.endswith("it has not been measured")
    made.measure(CPU)
    assert made.caps(CPU, 3)
    assert made.records.of("cap") == []


def test_a_step_that_runs_out_is_a_row_that_says_where(path):
    made = bench(path, Steps(fails=(1,)))
    made.predict()
    made.measure(CPU)
    ran = [(row["ran"], row["why"]) for row in made.records.of("measured")]
    assert ran[1] == (False, "update: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert ran[0] == ran[2] == (True, None)
    assert set(made.records.of("measured")[1]["phases"]) == {"rollout"}


def test_another_failure_is_not_taken_for_memory_and_keeps_nobody_waiting(path):
    steps = Steps()

    def broken(draw, target, phases):
        if draw.number == 1:
            raise RuntimeError("shapes do not match\nand more")
        steps(draw, target, phases)

    made = bench(path, broken)
    made.predict()
    assert made.measure(CPU)
    assert made.failures == ["measure 1: RuntimeError: shapes do not match"]
    assert [row["number"] for row in made.records.of("measured")] == [0, 2]
    made.rehearse = steps
    made.measure(CPU)
    assert [row["number"] for row in Records(path).of("measured")] == [0, 2, 1]


def test_a_stopped_bench_goes_on(path):
    first = bench(path)
    left = iter([1.0, 1.0, 0.0])
    first.seconds_left = lambda: next(left)
    assert not first.predict()
    assert len(first.records.of("predicted")) == 2

    steps = Steps()
    second = bench(path, steps)
    assert [draw.key for draw in second.configs] == [draw.key for draw in first.configs]
    calls = []
    second.predictor = lambda draw, gpu: calls.append(draw.number) or fake_trace(draw, gpu)
    assert second.predict()
    assert calls == [2]
    second.seconds_left = lambda: 100.0 if not steps.seen else 0.0
    assert not second.measure(CPU)
    assert steps.seen == [0]

    third = bench(path, steps)
    assert third.measure(CPU)
    assert steps.seen == [0, 1, 2]
    assert third.caps(CPU, 1)
    assert third.caps(CPU, 1)
    assert len(steps.seen) == 5  # both caps, once


def test_a_torn_last_line_is_as_if_it_had_not_been_written(path):
    made = bench(path)
    made.predict()
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])  # killed while the third prediction was written
    again = bench(path)
    assert len(again.records.of("predicted")) == 2
    again.predict()
    assert [row["number"] for row in Records(path).of("predicted")] == [0, 1, 2]
    kept = path.read_bytes().split(b"\n")
    assert kept[:3] == whole.split(b"\n")[:3]
    assert len(kept) == 6  # the torn line stays, damaged, on a line of its own


def test_a_line_without_its_end_is_whole_if_its_object_is(path):
    made = bench(path)
    made.predict()
    path.write_bytes(path.read_bytes()[:-1])
    again = bench(path)
    assert len(again.records.of("predicted")) == 3
    again.measure(CPU)
    assert len(Records(path).of("measured")) == 3


def test_a_file_of_another_draw_is_not_mixed_with_this_one(path):
    bench(path)
    with pytest.raises(UsageError, match="was drawn with --seed 5, not 6"):
        bench(path, seed=6)
    with pytest.raises(UsageError, match="was drawn with --configs 3, not 4"):
        bench(path, count=4)
    assert len(start(path, CPU, count=None, seed=None, gpu=None).configs) == 3


def test_configs_of_a_gpu_are_predicted_here_and_measured_there(tmp_path):
    path = tmp_path / "h200.jsonl"
    made = start(path, CPU, count=2, seed=None, gpu="h200")
    made.predictor = fake_trace
    assert made.predict()
    with pytest.raises(UsageError, match="no GPU can be used here"):
        made.measure(CPU)
    row = lines(path)[0]
    assert row["device"] == {"gpu": "H200", "memory_bytes": 143155 << 20}
    other = Target("cuda", 0, (9, 0), 80 << 30)
    with pytest.raises(UsageError, match=r"predictions for H200, 139\.8 GiB; this GPU has 80\.0"):
        made.measure(other)


def test_a_file_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="cannot write"):
        Records(tmp_path / "file" / "memory.jsonl").append("drawn", {})


def test_the_code_of_a_record_does_not_depend_on_version_control(tmp_path, monkeypatch):
    found = provenance()
    monkeypatch.chdir(tmp_path)
    assert provenance() == found
    assert found["versions"]["torch"] == torch.__version__


def test_phases_inside_others_have_their_own_peaks(monkeypatch):
    phases = Phases(CPU)
    peaks = iter([10, 70, 20, 5])
    monkeypatch.setattr(phases.probe, "end_phase", lambda: (next(peaks), 1, {}))
    with phases("update"), phases("update_critic"):  # 10 before, 20 after
        pass
    with phases("update"):
        pass
    assert {name: found["allocated"] for name, found in phases.found.items()} == {"update": 20, "update_critic": 70}
    assert phases.most("allocated") == 70
    assert phases.open == []


def test_the_gpu_that_is_predicted_for():
    assert stand_in_of(memory.gpu_of(CPU, "a100")).capability == (8, 0)
    assert stand_in_of(memory.gpu_of(CPU, None)).capability == (9, 0)
    assert memory.short_name(CPU, None) == "cpu"
    assert memory.short_name(CPU, "4090") == "rtx_4090"


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures real models there, for minutes")
def test_the_whole_command_in_its_small_form(tmp_path, capfd):
    out = tmp_path / "memory.json"
    assert main(["bench", "memory", "--configs", "1", "--seed", "2", "--out", str(out), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    written = json.loads(out.read_text())
    assert written["command"] == "ullage bench memory --seed 2 --configs 1 --caps 1"
    assert {"date", "hardware", "versions"} < written.keys()
    assert written["rows"] == printed["rows"]
    kinds = [row["kind"] for row in lines(tmp_path / "memory.jsonl")]
    assert kinds == ["drawn", "predicted", "measured", "cap", "cap"]
    for row in written["rows"]:
        assert row["ran"] is True
        assert {"load", "rollout", "logprob", "update"} <= row["measured"]["phases"].keys()
        assert row["predicted_phases"]["trace"].keys() == row["measured"]["phases"].keys()
    # A second time nothing is left to do, and the table is the same.
    assert main(["bench", "memory", "--out", str(out)]) == 0
    assert "allocated peak of a run" in capfd.readouterr().out
    assert [row["kind"] for row in lines(tmp_path / "memory.jsonl")] == kinds


def test_what_failed_is_an_error_at_the_end(tmp_path, capfd):
    out = tmp_path / "memory.json"
    assert main(["bench", "memory", "--configs", "1", "--only", "measure", "--out", str(out)]) == 1
    assert "measure 0: it has no prediction" in capfd.readouterr().err
    assert not out.exists()


def test_a_count_is_above_zero(tmp_path, capfd):
    assert main(["bench", "memory", "--configs", "0", "--out", str(tmp_path / "x.json")]) == 2
    assert "'0' is no number above 0" in capfd.readouterr().err
