"""The sandbox, by programs that try to leave it. A kind that this machine does not have is skipped, and says so."""

import os
import socket

import psutil
import pytest

from ullage.base.errors import ConfigError
from ullage.environments import _sandbox
from ullage.environments._sandbox import Limits, Sandbox, Unavailable, bubblewrap_command, run, sandlock_command

LIMITS = Limits(seconds=10.0)


@pytest.fixture(scope="module", params=[bubblewrap_command, sandlock_command], ids=["bubblewrap", "sandlock"])
def command(request):
    try:
        output, _ = run(request.param, "print(6 * 7)", LIMITS)
    except Unavailable as reason:
        pytest.skip(f"no sandbox of this kind here: {reason}")
    if output != "42\n":
        pytest.skip(f"no sandbox of this kind here: {output}")
    return request.param


def test_what_a_program_prints_comes_back(command):
    assert run(command, "import sys\nprint('a', file=sys.stderr, flush=True)\nprint('é')", LIMITS) == ("a\né\n", True)


def test_an_error_is_part_of_the_output(command):
    output, succeeded = run(command, "print(1, flush=True)\n1 / 0", LIMITS)
    assert output.startswith("1\nTraceback")
    assert output.endswith("ZeroDivisionError: division by zero\n")
    assert not succeeded
    assert run(command, "raise SystemExit(3)", LIMITS) == ("", False)


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    file = tmp_path_factory.mktemp("home") / "secret"
    file.write_text("hunter2")
    return file


def test_no_file_of_the_machine_can_be_read(command, secret):
    code = f"""
import os
for path in ({str(secret)!r}, "/etc/shadow", "/etc/passwd", os.path.expanduser("~/.bashrc"), "/proc/1/environ"):
    try:
        print(open(path).read())
    except OSError as error:
        print(type(error).__name__)
try:
    os.symlink({str(secret)!r}, "link")
except OSError as error:
    print(type(error).__name__)
"""
    output, succeeded = run(command, code, LIMITS)
    assert succeeded
    assert set(output.split()) <= {"PermissionError", "FileNotFoundError", "OSError"}
    assert len(output.split()) == 6


def test_nothing_can_be_written(command, tmp_path):
    code = f"""
import os, sys
for folder in ({str(tmp_path)!r}, "/tmp", "/usr", "/dev/shm", "/", sys.prefix, "."):
    try:
        open(os.path.join(folder, "planted"), "w").write("x")
        print("wrote", folder)
    except OSError as error:
        print("no")
"""
    output, succeeded = run(command, code, LIMITS)
    assert (output, succeeded) == ("no\n" * 7, True)
    assert list(tmp_path.iterdir()) == []


def test_no_network_not_even_this_machine(command):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nprint('connected')"
        output, succeeded = run(command, code, LIMITS)
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
    assert not succeeded
    assert "connected" not in output


def test_no_variable_of_the_run_is_seen(command, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    output, _ = run(command, "import os\nprint(dict(os.environ))", LIMITS)
    assert "hunter2" not in output
    assert "OMP_NUM_THREADS" in output


def test_no_process_can_be_started(command):
    code = """
import os, subprocess, threading
for start in (os.fork, lambda: os.posix_spawn("/bin/ls", ["ls"], {}), lambda: subprocess.run(["/bin/ls"])):
    try:
        start()
        print("started")
    except OSError:
        print("no")
thread = threading.Thread(target=lambda: print("threads may"))
thread.start(), thread.join()
"""
    assert run(command, code, LIMITS) == ("no\nno\nno\nthreads may\n", True)


def test_a_program_cannot_signal_the_run(command):
    run(command, f"import os\nos.kill({os.getpid()}, 9)\nos.kill(os.getppid(), 9)", LIMITS)
    output, succeeded = run(command, f"import os\nos.kill({os.getpid()}, 0)", LIMITS)
    assert not succeeded
    assert "PermissionError" in output or "ProcessLookupError" in output


def test_endless_loops_end(command):
    before = set(psutil.Process().children(recursive=True))
    output, succeeded = run(command, "print('in', flush=True)\nwhile True: pass", Limits(seconds=0.5))
    assert (output, succeeded) == ("in\n\nError: timeout after 0.5 s\n", False)
    assert set(psutil.Process().children(recursive=True)) == before


def test_a_program_that_closes_its_output_and_stays(command):
    code = "import os\nos.close(1); os.close(2)\nwhile True: pass"
    before = set(psutil.Process().children(recursive=True))
    assert run(command, code, Limits(seconds=0.5))[1] is False
    assert set(psutil.Process().children(recursive=True)) == before


def test_huge_output_is_cut(command):
    output, succeeded = run(command, "while True: print('x' * 10_000)", Limits(seconds=10.0, output_bytes=100))
    assert (output, succeeded) == ("x" * 100 + "\nError: more than 100 bytes of output\n", False)


def test_memory_is_limited(command):
    output, succeeded = run(command, "x = bytearray(1 << 30)\nprint('has it')", Limits(memory_bytes=256 << 20))
    assert not succeeded
    assert "MemoryError" in output or "killed; it may use 256 MiB of memory" in output


@pytest.mark.parametrize(
    "code",
    [
        "shared = mmap.mmap(-1, 600 << 20)",
        "shared = mmap.mmap(os.open('/dev/zero', os.O_RDWR), 600 << 20)",
        "os.ftruncate(os.memfd_create('memory'), 600 << 20)",
        "assert system.shmget(0, 64 << 20, 0o1600) >= 0",
        "assert system.msgget(0, 0o1600) >= 0",
    ],
    ids=["shared mapping", "device", "file without a name", "System V segment", "System V queue"],
)
def test_memory_is_limited_whatever_it_is_called(command, code):
    """What is shared is no data of the process; what has a number of its own is not even in its address space."""
    begin = "import ctypes, mmap, os\nsystem = ctypes.CDLL(None)\nprint('begun', flush=True)\n"
    output, succeeded = run(command, f"{begin}{code}\nprint('has it')", Limits(memory_bytes=256 << 20))
    assert not succeeded
    assert output.startswith("begun\n")
    assert "has it" not in output


def test_a_program_may_use_what_it_is_given(command):
    code = """
import mmap, threading
import numpy
shared = mmap.mmap(-1, 200 << 20)
shared.close()
private = bytearray(150 << 20)
threads = [threading.Thread(target=lambda: bytearray(1 << 20)) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(numpy.arange(4).sum())
"""
    assert run(command, code, Limits(memory_bytes=256 << 20)) == ("6\n", True)


@pytest.mark.parametrize("code", ["print(1)\0", "x = '" + "a" * 100_001 + "'", "\udc80"])
def test_what_is_no_program_is_told(command, code):
    output, succeeded = run(command, code, LIMITS)
    assert output.startswith("Error: the program is")
    assert not succeeded


def test_where_none_works_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_sandbox.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_sandbox.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        Sandbox(Limits())
    assert refused.value.cause == (
        "the python tool needs a sandbox, and none works here (bubblewrap: not installed; sandlock: not installed)"
    )
    assert "bubblewrap" in refused.value.remedy
    assert "pip install 'ullage[sandbox]'" in refused.value.remedy


def test_one_that_is_there_but_does_not_work_is_passed_over(monkeypatch, tmp_path):
    """As where user namespaces are off."""
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho bwrap: No permissions to create new namespace\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(_sandbox.shutil, "which", lambda name: str(broken))
    monkeypatch.setattr(_sandbox.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\(bubblewrap: bwrap: No permissions to create new namespace; sandlock"):
        Sandbox(Limits())
