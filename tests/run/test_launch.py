"""The launcher: what it makes of ranks that fail, hang or are killed, and which runs it throws away."""

import json
import signal
import subprocess
import sys
import time

import pytest

from ullage.base.errors import ConfigError, DataError, PeerLostError, PreemptedError, UllageError, WriteError
from ullage.engine.checkpoint import write_checkpoint
from ullage.run import launch
from ullage.run.launch import Rank, conclude, discard_if_untrained, newest_checkpoint, watch
from ullage.telemetry.run_directory import RunDirectory
from ullage.trainer.stop import Stop


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path, "run")
    directory.create()
    return directory


def says(error):
    word = {"kind": type(error).__name__, "cause": error.cause, "remedy": error.remedy}
    return f"import sys; print({json.dumps(json.dumps(word))}); sys.exit({error.code})"


def start(*scripts):
    command = [sys.executable, "-S", "-c"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return [Rank(n, subprocess.Popen([*command, script], **pipes)) for n, script in enumerate(scripts)]


LOST = says(PeerLostError("rank 0 lost a peer", "see the logs"))
KILLED = "import os; os.kill(os.getpid(), 9)"
HANGS = "import time; time.sleep(60)"


def test_all_well(directory):
    assert watch(start("", ""), Stop()) == []
    conclude(directory, [])


@pytest.mark.parametrize(
    ("scripts", "kind", "cause"),
    [
        ((LOST, says(DataError("line 17 is broken"))), DataError, "line 17 is broken"),
        ((says(ConfigError("a")), says(ConfigError("b"))), ConfigError, "a"),
        ((LOST, KILLED), PeerLostError, "rank 1 was killed by SIGKILL"),
        ((KILLED, LOST), PeerLostError, "rank 0 was killed by SIGKILL"),
        ((LOST, "import sys; sys.exit(5)"), PeerLostError, "rank 1 ended with code 5 without a word"),
        ((LOST, LOST), PeerLostError, "rank 0 lost a peer"),
        (("", says(PreemptedError("asked"))), PreemptedError, "asked"),
        ((says(UllageError("rank 0: internal error")), LOST), UllageError, "rank 0: internal error"),
    ],
)
def test_the_error_that_explains_the_others_is_raised(directory, scripts, kind, cause):
    with pytest.raises(UllageError) as caught:
        conclude(directory, watch(start(*scripts), Stop()))
    assert (type(caught.value), caught.value.cause) == (kind, cause)


def test_a_peer_that_hangs_is_ended_after_the_grace(directory, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.3)
    began = time.monotonic()
    failed = watch(start(HANGS, says(DataError("broken"))), Stop())
    assert [(rank.number, rank.process.returncode) for rank in failed] == [(1, 65), (0, -signal.SIGKILL)]
    assert time.monotonic() - began < 30
    with pytest.raises(DataError):
        conclude(directory, failed)


LISTENS = """
import signal, sys, time
heard = []
def note(number, frame):
    heard.append(number)
signal.signal(signal.SIGTERM, note)
print("ready", file=sys.stderr, flush=True)
while not heard:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(len(heard))
"""


def test_a_signal_is_passed_on_once():
    ranks = []
    for number in range(2):
        process = subprocess.Popen([sys.executable, "-S", "-c", LISTENS], stdin=-1, stdout=-1, stderr=-1)
        assert process.stderr.readline() == b"ready\n"
        process.stderr.close()
        ranks.append(Rank(number, process))
    stop = Stop()
    stop.requested = signal.SIGTERM
    assert [rank.process.returncode for rank in watch(ranks, stop)] == [1, 1]


def test_a_run_without_results_is_discarded(directory):
    discard_if_untrained(directory)
    assert not directory.path.exists()


def test_a_run_with_results_is_kept(directory):
    directory.metrics.write_text("{}\n")
    discard_if_untrained(directory)
    assert directory.path.exists()


def test_a_run_with_a_checkpoint_is_kept(directory):
    write_checkpoint(directory.checkpoints, 0, tensors={}, state={}, facts={})
    discard_if_untrained(directory)
    assert directory.path.exists()


def test_without_a_checkpoint_a_run_begins_at_the_beginning(directory):
    assert newest_checkpoint(directory) == (None, [])


def test_the_newest_whole_checkpoint_is_taken(directory):
    for step in (1, 2):
        write_checkpoint(directory.checkpoints, step, tensors={}, state={"step": step}, facts={})
    assert newest_checkpoint(directory) == (directory.checkpoint_of(2), [])
    (directory.checkpoint_of(2) / "state.json").write_text("{}")
    folder, (warning,) = newest_checkpoint(directory)
    assert folder == directory.checkpoint_of(1)
    assert "step_2/state.json" in warning
    (directory.checkpoint_of(1) / "state.json").write_text("{}")
    with pytest.raises(WriteError, match=r"every checkpoint in .* is damaged"):
        newest_checkpoint(directory)
