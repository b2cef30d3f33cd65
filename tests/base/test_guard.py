"""The guard: it ends as the process behind it ended, and nothing is left when it does."""

import signal
import subprocess
import sys

import psutil
import pytest

# Behind the guard: a child that left the session, its process id, then whatever the test asks for.
PROGRAM = """
import os, signal, subprocess, sys, time
from ullage.base.guard import fork_behind_guard
fork_behind_guard()
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
sys.stdout.write(f"{os.getpid()} {child.pid}\\n")
sys.stdout.flush()
"""


def guarded(ending):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + ending], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, [int(pid) for pid in process.stdout.readline().split()]


def assert_ends(process, pids, code):
    assert process.wait(10) == code
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(0)", 0),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGABRT)", -signal.SIGABRT),
    ],
)
def test_end_is_passed_on(ending, code):
    process, pids = guarded(ending)
    assert_ends(process, pids, code)


def test_end_of_input_kills():
    process, pids = guarded("9**9**9")
    process.stdin.close()
    assert_ends(process, pids, -signal.SIGKILL)


def test_stop_signal_kills():
    process, pids = guarded("9**9**9")
    process.send_signal(signal.SIGUSR1)
    assert_ends(process, pids, -signal.SIGKILL)


def test_unread_input_is_left_to_the_guarded_process():
    process, pids = guarded("sys.exit(int(sys.stdin.readline()))")
    process.stdin.write("42\n")
    process.stdin.flush()
    assert_ends(process, pids, 42)


def test_ended_children_do_not_end_the_guard():
    process, pids = guarded("for _ in range(5): subprocess.run(['true'])\nos._exit(3)")
    assert_ends(process, pids, 3)


def test_death_of_the_guard_itself_kills_what_it_guards():
    process, (scorer, child) = guarded("9**9**9")
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    scorer_gone = psutil.wait_procs([psutil.Process(scorer)] if psutil.pid_exists(scorer) else [], timeout=10)[1] == []
    psutil.Process(child).kill()  # only the guard could have found this one
    process.stdin.close()
    process.stdout.close()
    assert scorer_gone
