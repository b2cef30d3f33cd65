"""Signals as requests: noted, looked at where it is safe, and obeyed at once when they are repeated."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from ullage.base.communicator import Solo
from ullage.base.errors import InterruptedRunError, PreemptedError
from ullage.trainer.stop import Stop


class FakeKeeper:
    step = 3
    resume_command = "ullage resume runs/x"

    def __init__(self):
        self.calls = []

    def save(self):
        self.calls.append("save")

    def rewind(self):
        self.calls.append("rewind")


def test_nothing_happens_unasked():
    keeper = FakeKeeper()
    with Stop().installed() as stop:
        stop.check(Solo(), keeper)
        stop.poll()
    assert keeper.calls == []


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, PreemptedError), (signal.SIGINT, InterruptedRunError)])
def test_a_signal_is_noted_with_its_phase_and_saves_between_steps(number, error):
    keeper = FakeKeeper()
    with Stop().installed() as stop:
        stop.current_phase = lambda: "update"
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.phase) == (number, "update")
        with pytest.raises(error, match=f"{number.name}: stopped after step 3, checkpoint saved") as caught:
            stop.check(Solo(), keeper)
    assert caught.value.remedy == "continue with: ullage resume runs/x"
    assert keeper.calls == ["save"]


def test_handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Stop().installed():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_signal_that_was_blocked_is_heard():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # to this thread: others of the test's do not block it
    with Stop().installed() as stop:
        assert stop.requested == signal.SIGTERM


def test_a_rollout_is_abandoned_and_the_state_before_it_saved():
    keeper = FakeKeeper()
    with Stop().installed() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(PreemptedError), stop.discarding(keeper):
            stop.poll()
    assert keeper.calls == ["rewind", "save"]


def test_what_is_deferred_is_not_abandoned():
    with Stop().installed() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with stop.deferred():
            stop.poll()
        with pytest.raises(PreemptedError), stop.discarding(FakeKeeper()):
            stop.poll()


class AskedPeer(Solo):
    """One of two ranks; the other was asked to stop."""

    size = 2

    def max(self, values):
        return [max(value, float(signal.SIGTERM)) for value in values]


def test_with_several_ranks_all_stop_together_and_only_between_steps():
    keeper = FakeKeeper()
    with Stop().installed() as stop:
        with pytest.raises(PreemptedError):
            stop.check(AskedPeer(), keeper)
        os.kill(os.getpid(), signal.SIGTERM)
        stop.poll()  # a peer waits for this rollout
    assert keeper.calls == ["save"]


TWICE = """
import os, signal
from ullage.trainer.stop import Stop
with Stop(patient={patient}).installed():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.{second})
    print("still here")
"""


@pytest.mark.parametrize(
    ("patient", "second", "code", "output"),
    [(False, "SIGTERM", 143, ""), (False, "SIGINT", 130, ""), (True, "SIGTERM", 0, "still here\n")],
)
def test_asked_twice(patient, second, code, output):
    script = TWICE.format(patient=patient, second=second)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, output, "")


def test_outside_the_main_thread_there_is_nothing_to_install():
    heard = []

    def run():
        with Stop().installed() as stop:
            heard.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert heard == [None]


def test_importing_it_does_not_load_torch():
    """Otherwise signals would be lost during the seconds that takes."""
    script = "import sys, ullage.run.launch, ullage.run.rank; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"False\n"
