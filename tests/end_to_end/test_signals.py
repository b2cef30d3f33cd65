"""SIGTERM and Ctrl-C save and stop with 75 and 130, wherever they come; resumed, the run equals an unstopped one."""

import os
import signal
import subprocess
import sys
import time

import pytest
from runs import assert_same_run, outcome_of, wait_for

SOME = {"trainer__save_freq": 3, "trainer__test_freq": 3}  # most steps save nothing unless they are asked to stop
PHASES = [("rollout", 5, 4), ("reward", 5, 4), ("update", 5, 5), ("eval", 3, 3), ("save", 3, 3), ("eval", 0, 0)]


@pytest.fixture(scope="module")
def uninterrupted(ullage, task, tmp_path_factory):
    runs = tmp_path_factory.mktemp("uninterrupted")
    assert ullage(*task.arguments(runs, "whole", **SOME)).code == 0
    return runs / "whole"


def stop_in_phase(ullage, task, runs, kind, code, phase, step, saved):
    """A step that has not changed anything yet is abandoned; one that has is finished before the checkpoint."""
    run = runs / "stopped"
    stopped = ullage(*task.arguments(runs, "stopped", **SOME), fault=f"step={step},phase={phase},kind={kind}")
    assert stopped.code == code, stopped.stderr
    reason, command = f"{kind.upper()}: stopped after step {saved}, checkpoint saved", f"ullage resume {run}"
    assert stopped.stderr.splitlines()[-2:] == [f"ullage: error: {reason}", f"  fix: continue with: {command}"]
    expected = {"code": code, "reason": reason, "phase": phase, "step": step, "resume_command": command}
    assert outcome_of(run) == expected
    assert (run / "checkpoints" / "latest").read_text() == f"step_{saved}\n"
    return run


@pytest.mark.parametrize(("phase", "step", "saved"), PHASES)
def test_sigterm_in_a_phase(ullage, task, tmp_path, uninterrupted, phase, step, saved):
    run = stop_in_phase(ullage, task, tmp_path, "sigterm", 75, phase, step, saved)
    assert ullage("resume", run).code == 0
    assert_same_run(run, uninterrupted)


@pytest.mark.parametrize(("phase", "step", "saved"), PHASES)
def test_sigint_in_a_phase(ullage, task, tmp_path, phase, step, saved):
    stop_in_phase(ullage, task, tmp_path, "sigint", 130, phase, step, saved)


def test_a_signal_in_the_last_step_lets_the_run_finish(ullage, task, tmp_path, uninterrupted):
    arguments = task.arguments(tmp_path, "stopped", **SOME)
    assert ullage(*arguments, fault="step=6,phase=update,kind=sigterm").code == 0
    assert_same_run(tmp_path / "stopped", uninterrupted)


def test_a_second_signal_ends_at_once(ullage, task, tmp_path):
    reward, called = tmp_path / "slow.py", tmp_path / "called"
    reward.write_text(
        "import pathlib, time\n"
        "def score(prompt, response, target):\n"
        f"    pathlib.Path({str(called)!r}).touch()\n"
        "    time.sleep(60)\n"
    )
    arguments = task.arguments(tmp_path, "stopped", reward=reward, reward__timeout_seconds=60, data__val_files=None)
    run = ullage.start(*arguments)
    wait_for(called.exists)
    time.sleep(0.5)  # the rollout is over: a first request is for after the rewards, which take minutes
    os.kill(run.pid, signal.SIGTERM)
    time.sleep(0.5)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait().code == 128 + signal.SIGTERM
    assert not (tmp_path / "stopped" / "exit.json").exists()


def test_a_signal_while_the_program_loads_is_not_lost(ullage, task, tmp_path, uninterrupted):
    run = tmp_path / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-m", "ullage", *task.arguments(tmp_path, "stopped", **SOME)],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (run / "resolved.yaml").exists())
    time.sleep(0.2)  # it listens now, and imports torch
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr.count("Traceback")) == (75, 0), stderr
    assert outcome_of(run)["reason"] == "SIGTERM: stopped after step 0, checkpoint saved"
    assert ullage("resume", run).code == 0
    assert_same_run(run, uninterrupted)
