"""The run folder: layout, names, refusals, atomic writes, and the lock between real processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ullage.base.errors import ConfigError, UsageError, WriteError
from ullage.telemetry.lock import Owner, read_owner
from ullage.telemetry.run_directory import RunDirectory, RunInfo, check_name, make_name, write_atomically


def test_layout_is_the_contract(tmp_path):
    run = RunDirectory(tmp_path, "first")
    paths = {
        run.config: "config.yaml",
        run.resolved: "resolved.yaml",
        run.plan: "plan.json",
        run.info: "run.json",
        run.metrics: "metrics.jsonl",
        run.memory: "memory.jsonl",
        run.samples_of(7): "samples/step_7.jsonl",
        run.checkpoint_of(12): "checkpoints/step_12",
        run.final: "final",
        run.events: "logs/events.log",
        run.exit: "exit.json",
    }
    assert {path.relative_to(tmp_path / "first").as_posix() for path in paths} == set(paths.values())


def test_create_makes_folders_and_takes_the_lock(tmp_path):
    run = RunDirectory(tmp_path / "deep" / "runs", "first")
    run.create()
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "lock", "logs", "samples"]
    owner = read_owner(run.path / "lock")
    assert owner is not None
    assert (owner.pid, owner.host) == (os.getpid(), socket.gethostname())
    run.close()
    assert not (run.path / "lock").exists()


def test_an_existing_run_is_refused_and_left_alone(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "keep").write_text("mine")
    with pytest.raises(WriteError) as caught:
        RunDirectory(tmp_path, "first").create()
    assert caught.value.code == 74
    assert caught.value.cause == f"the run {tmp_path / 'first'} already exists"
    assert f"ullage resume {tmp_path / 'first'}" in caught.value.remedy
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["keep"]


def test_a_file_in_the_way_is_refused_and_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(WriteError, match="cannot write"):
            RunDirectory(root, "first").create()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


READ_ONLY = """
import os, sys
from pathlib import Path
from ullage.base.errors import WriteError
from ullage.telemetry.run_directory import RunDirectory
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
try:
    RunDirectory(Path(sys.argv[1]), "first").create()
except WriteError as error:
    sys.stdout.write(error.cause)
"""


def test_a_read_only_folder_is_refused_and_nothing_is_left(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    # root may write anywhere, so the attempt is made by another user, from inside: parents may be closed to it
    command = [sys.executable, "-c", READ_ONLY, "."]
    done = subprocess.run(command, cwd=locked, capture_output=True, text=True, check=True, env=_environment())
    assert done.stdout == "cannot write first: Permission denied"
    assert list(locked.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "-rf", "CON", "nul.txt", "", ".hidden", "a" * 81, "naïve", "end.", "a\n"]
)
def test_names_that_cannot_be_folders_are_refused(name):
    with pytest.raises(ConfigError, match="experiment_name"):
        check_name(name)


def test_made_up_names_are_valid_and_differ(tmp_path):
    names = {make_name() for _ in range(50)}
    assert len(names) > 45
    assert all(check_name(name) == name for name in names)
    assert RunDirectory(tmp_path).name.count("-") == 2


def test_open_existing_needs_a_run(tmp_path):
    with pytest.raises(UsageError, match="no run in"):
        RunDirectory.open_existing(tmp_path)
    run = RunDirectory(tmp_path, "first")
    run.create()
    info = RunInfo(name="first", algorithm="grpo", model="tiny", total_steps=6, created_at=1.5)
    run.write_info(info)
    run.close()
    opened = RunDirectory.open_existing(tmp_path / "first")
    assert (opened.name, opened.path) == ("first", (tmp_path / "first").resolve())
    assert RunInfo(**json.loads(opened.info.read_text())) == info


def test_reopen_forgets_the_earlier_outcome(tmp_path):
    run = RunDirectory(tmp_path, "first")
    run.create()
    run.exit.write_text("{}")
    run.close()
    run.reopen()
    assert not run.exit.exists()
    assert read_owner(run.path / "lock") is not None


def test_the_second_writer_is_refused_in_the_same_process_too(tmp_path):
    first, second = RunDirectory(tmp_path, "first"), RunDirectory(tmp_path, "first")
    first.create()
    with pytest.raises(WriteError, match=rf"being written by process {os.getpid()} on"):
        second.reopen()
    second.close()
    assert (first.path / "lock").exists()


def test_write_atomically_leaves_the_old_text_when_it_fails(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(WriteError, match="cannot write"):
        write_atomically(tmp_path / "missing" / "file", "new")
    write_atomically(path, "new ü\n")
    assert path.read_bytes() == "new ü\n".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


HOLDER = """
import sys, time
from pathlib import Path
from ullage.telemetry.run_directory import RunDirectory
run = RunDirectory(Path(sys.argv[1]), "first")
run.create()
sys.stdout.write("ready\\n"); sys.stdout.flush()
time.sleep(60)
"""


def test_a_killed_owner_loses_the_lock_and_a_living_one_keeps_it(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=_environment()
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(WriteError, match=f"process {holder.pid} on"):
            RunDirectory(tmp_path, "first").reopen()
        holder.send_signal(signal.SIGKILL)
        while (owner := read_owner(tmp_path / "first" / "lock")) is not None and owner.is_alive():
            time.sleep(0.01)  # a killed child is a zombie until waited for: that must count as dead
        run = RunDirectory(tmp_path, "first")
        run.reopen()
        assert read_owner(run.path / "lock").pid == os.getpid()
        assert [path.name for path in run.path.glob(".lock*")] == []
    finally:
        holder.kill()
        holder.communicate()


def test_an_owner_on_another_machine_counts_as_alive(tmp_path):
    (tmp_path / "first").mkdir()
    lock = tmp_path / "first" / "lock"
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "taken_at": 0.0}))
    with pytest.raises(WriteError, match="process 1 on elsewhere") as caught:
        RunDirectory(tmp_path, "first").reopen()
    assert f"delete {lock}" in caught.value.remedy


def test_a_process_that_got_the_number_later_is_another_one():
    assert Owner(os.getpid(), socket.gethostname(), time.time()).is_alive()
    assert not Owner(os.getpid(), socket.gethostname(), taken_at=1000.0).is_alive()


def test_a_lock_without_an_owner_is_held_only_while_it_may_be_in_the_making(tmp_path):
    (tmp_path / "first").mkdir()
    lock = tmp_path / "first" / "lock"
    lock.write_text("")
    with pytest.raises(WriteError, match="another process"):
        RunDirectory(tmp_path, "first").reopen()
    os.utime(lock, (1000, 1000))
    RunDirectory(tmp_path, "first").reopen()
    assert read_owner(lock).pid == os.getpid()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
