"""Summaries of runs in every state, also damaged ones."""

import json
import os
import socket
import time

import pytest

from ullage.telemetry.reader import read_metrics, read_run, read_runs
from ullage.telemetry.run_directory import RunDirectory, RunInfo
from ullage.telemetry.writer import MetricsWriter


def make_run(root, name="first"):
    run = RunDirectory(root, name)
    run.create()
    run.write_info(RunInfo(name=name, algorithm="grpo", model="tiny", total_steps=6, created_at=100.0))
    return run


def test_a_whole_run(tmp_path):
    run = make_run(tmp_path)
    writer = MetricsWriter(run)
    writer.step(0, {"eval/sums/mean@4": 0.2})
    for step, reward in ((1, 0.3), (2, 0.5), (3, float("nan"))):
        writer.step(step, {"reward/mean": reward, "eval/sums/mean@4": 0.9 if step != 3 else 0.1})
    writer.exit(0, "finished", None, 3, None)
    run.close()
    summary = read_run(run.path)
    assert (summary.name, summary.state, summary.step, summary.total_steps) == ("first", "finished", 3, 6)
    assert (summary.reward, summary.best_evaluation, summary.best_evaluation_step) == (0.5, 0.9, 1)
    assert (summary.model, summary.algorithm, summary.created_at) == ("tiny", "grpo", 100.0)
    assert summary.reason == "finished"


def test_the_best_evaluation_of_supervised_training_is_the_lowest(tmp_path):
    run = make_run(tmp_path)
    writer = MetricsWriter(run)
    for step, loss in ((0, 3.0), (1, 1.5), (2, 2.0)):
        writer.step(step, {"eval/sums/loss": loss})
    run.close()
    summary = read_run(run.path)
    assert (summary.best_evaluation, summary.best_evaluation_step) == (1.5, 1)


@pytest.mark.parametrize(
    ("code", "state"), [(0, "finished"), (75, "interrupted"), (130, "interrupted"), (70, "failed"), (1, "failed")]
)
def test_the_exit_code_decides_the_state(tmp_path, code, state):
    run = make_run(tmp_path)
    MetricsWriter(run).exit(code, "", None, 0, None)
    assert read_run(run.path).state == "running"
    run.close()
    assert read_run(run.path).state == state


def test_a_killed_run_is_interrupted(tmp_path):
    run = make_run(tmp_path)
    dead = {"pid": os.getpid(), "host": socket.gethostname(), "taken_at": 1000.0}
    (run.path / "lock").write_text(json.dumps(dead))
    assert read_run(run.path).state == "interrupted"


def test_half_written_and_foreign_lines_are_passed_over(tmp_path):
    run = make_run(tmp_path)
    run.metrics.write_bytes(
        b'{"step": 1, "a": 1}\n\n[1]\n{"step": "x"}\n\xff\xfe\n'
        b'{"step": 2, "a": null}\n{"step": 2, "b": 3}\n{"step": 3, "a'
    )
    assert read_metrics(run.path) == [{"step": 1, "a": 1}, {"step": 2, "a": None, "b": 3}]
    assert read_run(run.path).step == 2


def test_missing_and_damaged_files_leave_fields_empty(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "resolved.yaml").write_text("")
    (folder / "run.json").write_text('{"total_steps": "many", "model": 3')
    (folder / "exit.json").write_text("[]")
    summary = read_run(folder)
    assert (summary.name, summary.state, summary.step, summary.total_steps) == ("old", "interrupted", 0, None)
    assert (summary.reward, summary.best_evaluation, summary.model) == (None, None, None)


def test_runs_are_listed_newest_first_and_other_folders_left_out(tmp_path):
    for age, name in ((300, "oldest"), (100, "newest"), (200, "middle")):
        run = make_run(tmp_path, name)
        run.close()
        for path in (run.info, run.path):
            os.utime(path, (time.time() - age,) * 2)
    (tmp_path / "not_a_run").mkdir()
    (tmp_path / "file").write_text("")
    assert [summary.name for summary in read_runs(tmp_path)] == ["newest", "middle", "oldest"]
