"""Faults on demand: one signal, at one phase and step, on one rank; or memory that runs out in a pass."""

import signal
import subprocess
import sys

import pytest

from ullage.base import faults

SCRIPT = """
from ullage.base import faults
[fault] = faults.asked_for(0)
for step in (1, 2):
    for phase in ("rollout", "update"):
        print(step, phase, flush=True)
        fault.strike(phase, step)
"""


def test_strikes_at_its_phase_and_step(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "step=2,phase=rollout,kind=sigkill")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.splitlines() == ["1 rollout", "1 update", "2 rollout"]


def test_strikes_once(monkeypatch):
    monkeypatch.setenv(faults.VARIABLE, "step=3,phase=update,kind=sigterm")
    got = []
    monkeypatch.setattr("os.kill", lambda process, number: got.append(number))
    [fault] = faults.asked_for(0)
    for _ in range(2):
        fault.strike("update", 3)
        fault.strike("update", 4)
    assert got == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("wanted", "ranks"), [("step=1,phase=a,kind=sigint", [0]), ("step=1,phase=a,kind=sigint,rank=1", [1])]
)
def test_belongs_to_one_rank(monkeypatch, wanted, ranks):
    monkeypatch.setenv(faults.VARIABLE, wanted)
    assert [rank for rank in range(3) if faults.asked_for(rank)] == ranks


def test_none_without_the_variable(monkeypatch):
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    assert faults.asked_for(0) == []


def test_memory_runs_out_in_one_pass_of_a_phase_each_time_anew(monkeypatch):
    wanted = "step=2,phase=update,kind=oom,at=3,times=2;step=2,phase=values,kind=oom,half=backward,factor=1"
    monkeypatch.setenv(faults.VARIABLE, wanted)
    update, values = faults.asked_for(0)
    assert [update.runs_out("update", 1) for _ in range(4)] == [False] * 4
    assert not update.runs_out("values", 2)
    assert [update.runs_out("update", 2) for _ in range(8)] == [False, False, True, False, False, True, False, False]
    assert [values.runs_out("values", 2) for _ in range(2)] == [True, False]
    assert (values.half, values.factor, update.half, update.factor) == ("backward", 1, "forward", 2)
    update.strike("update", 2)  # no signal
