"""Loggers in processes of their own: real TensorBoard and offline wandb, and ones that fail in every way."""

import json
import sys
import time

import psutil
import pytest

from ullage.base.errors import ConfigError
from ullage.telemetry import sinks
from ullage.telemetry.run_directory import RunDirectory, RunInfo
from ullage.telemetry.sinks import ProcessSink, make_sinks

INFO = RunInfo(name="first", algorithm="grpo", model="tiny", total_steps=3, created_at=1000.0)


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path, "first")
    directory.create()
    yield directory
    directory.close()


def sink_of(run, warnings, script, close_seconds=5.0):
    return ProcessSink("fake", run, "p", warnings.append, [sys.executable, "-c", script], close_seconds)


def test_tensorboard_gets_every_finite_scalar(run):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    warnings = []
    [sink] = make_sinks(["console", "tensorboard", "tensorboard"], run, "project", warnings.append)
    sink._close_seconds = 60.0
    sink.start(INFO)
    sink.step(1, {"reward/mean": 0.25, "actor/loss": float("nan")})
    sink.step(2, {"reward/mean": 0.5})
    sink.stop()
    assert warnings == []
    events = event_accumulator.EventAccumulator(str(run.logs / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_wandb_works_offline_without_an_account(run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    warnings = []
    [sink] = make_sinks(["wandb"], run, "project", warnings.append)
    sink._close_seconds = 60.0
    sink.start(INFO)
    sink.step(1, {"reward/mean": 0.25})
    sink.stop()
    assert warnings == []
    [record] = (run.logs / "wandb").glob("wandb/offline-run-*/run-first-1000.wandb")
    assert b"reward/mean" in record.read_bytes()


def test_a_logger_that_is_not_installed_is_refused_before_the_run(run, monkeypatch):
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="asks for wandb, which is not installed") as caught:
        make_sinks(["console", "wandb"], run, "project", print)
    assert "pip install 'ullage[wandb]'" in caught.value.remedy


def test_a_logger_gets_the_run_then_its_steps(run):
    warnings = []
    out = run.logs / "seen"
    sink = sink_of(run, warnings, f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())")
    sink.start(INFO)
    sink.phase("rollout", 1, 2, "")
    sink.event("text")
    for step in range(1, 2001):  # more than a pipe holds
        sink.step(step, {"reward/mean": step / 7, "actor/loss": float("inf")})
    sink.stop()
    assert warnings == []
    opening, *steps = [json.loads(line) for line in out.read_text().splitlines()]
    assert (opening["info"]["name"], opening["project"]) == ("first", "p")
    assert steps == [
        {"step": step, "metrics": {"reward/mean": step / 7, "actor/loss": None}} for step in range(1, 2001)
    ]


def test_a_logger_that_dies_is_said_once_with_its_last_words(run):
    warnings = []
    sink = sink_of(run, warnings, "raise RuntimeError('no account')")
    sink.start(INFO)
    assert sink._process is not None
    sink._process.wait()
    for step in range(3):
        sink.step(step, {"reward/mean": 1.0})
    sink.stop()
    assert warnings == ["warning: logger fake is off, training goes on: RuntimeError: no account"]


def test_a_logger_that_fails_while_closing_is_said_too(run):
    warnings = []
    sink = sink_of(run, warnings, "import sys; sys.stdin.read(); sys.exit('upload failed')")
    sink.start(INFO)
    sink.stop()
    assert warnings == ["warning: logger fake is off, training goes on: upload failed"]


def test_a_logger_that_hangs_never_blocks_and_is_ended_with_its_children(run):
    warnings = []
    pid_file = run.logs / "pid"
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"
    child += f"open({str(pid_file)!r}, 'w').write(str(p.pid)); time.sleep(99)"
    sink = sink_of(run, warnings, child, close_seconds=0.3)
    sink.start(INFO)
    for step in range(5000):
        sink.step(step, {"reward/mean": 1.0})
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.01)
    hung = sink._process
    sink.stop()
    assert hung is not None
    assert hung.returncode == -9
    assert len(warnings) == 1
    assert "did not finish in 0 s" in warnings[0]
    grandchild = int(pid_file.read_text())
    while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def test_lines_that_nobody_reads_are_bounded(run, monkeypatch):
    monkeypatch.setattr(sinks, "_MAX_WAITING_LINES", 100)
    warnings = []
    sink = sink_of(run, warnings, "import time; time.sleep(99)")
    sink.start(INFO)
    for step in range(2000):
        sink.step(step, {"reward/mean": 1.0, "filler" * 20: 1.0})
    sink.stop()
    assert warnings == ["warning: logger fake is off, training goes on: takes no more lines"]


def test_a_logger_that_cannot_start_is_only_a_warning(run):
    warnings = []
    sink = ProcessSink("fake", run, "p", warnings.append, ["/no/such/program"])
    sink.start(INFO)
    sink.step(1, {})
    sink.stop()
    assert len(warnings) == 1
    assert "No such file or directory: '/no/such/program'" in warnings[0]
