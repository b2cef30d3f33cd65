"""Stands between the run and a process that executes user code, so that nothing of it outlives the run or a time limit.

A worker forks at its start: the child works, the parent guards. The guard executes no user code, so no endless loop,
held interpreter lock or exhausted memory keeps it from killing everything below it, including processes that left the
group (they become the guard's own children, PR_SET_CHILD_SUBREAPER). It acts when the pipe to the run breaks, however
the run ended, when it gets SIGUSR1, and when the working process ends by itself; then it ends in the same way.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
from pathlib import Path
from types import FrameType
from typing import BinaryIO, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STOP = signal.SIGUSR1
# A scheduler's notice to the whole job: the run decides what happens, and it still needs its workers.
NOTICES = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def enter_worker() -> tuple[BinaryIO, BinaryIO]:
    """Fork behind a guard, then (requests, replies): the pipes to the run, which user code does not see as stdio."""
    fork_behind_guard()
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    # What user code reads or prints must not meet the protocol, nor the run's terminal.
    with open(os.devnull, "r+b") as nowhere:
        for descriptor in (0, 1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    _yield_memory()
    return requests, replies


def _yield_memory() -> None:
    """User code that eats the machine's memory fails by itself, or is the first to be killed; the run is not."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (half if hard < 0 else min(half, hard), hard))
    with contextlib.suppress(OSError):  # Linux only, and some containers mount /proc read-only
        Path("/proc/self/oom_score_adj").write_text("1000")


def fork_behind_guard() -> None:
    """Returns in the process that may execute user code; its parent guards it and never returns. Fd 0 is a pipe."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for notice in (*NOTICES, signal.SIGCHLD, STOP):
        signal.signal(notice, _note)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    worker = os.fork()
    with contextlib.suppress(PermissionError):  # both sides do it, so that it holds on both whoever is first
        os.setpgid(worker, worker)
    if worker:
        os.close(1)  # replies are the worker's alone: the pipe ends with it
        _guard(worker, wake_read)
    signal.set_wakeup_fd(-1)
    os.close(wake_read)
    os.close(wake_write)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(STOP, signal.SIG_DFL)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it died before the line above
        os._exit(1)


def _note(number: int, frame: FrameType | None) -> None:
    """Does nothing: the wake-up pipe tells. A handler, unlike SIG_IGN, is not inherited by the user's programs."""


def _guard(worker: int, wake: int) -> NoReturn:
    poller = select.poll()
    poller.register(0, 0)  # no events asked for: only POLLHUP is reported, and requests are left to the worker
    poller.register(wake, select.POLLIN)
    status = None
    while status is None:
        events = dict(poller.poll())
        if 0 in events or STOP in os.read(wake, 4096):
            break
        status = _reaped(worker)
    status = _kill_everything(worker, status)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _reaped(worker: int) -> int | None:
    """Take leave of every child that has ended; the worker's exit status if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                found = ended[1]
    return found


def _kill_everything(worker: int, status: int | None) -> int:
    """Kill until there is no child left; orphans of the killed become children in turn. The worker's exit status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            ended, ended_status = os.waitpid(-1, 0)
        except ChildProcessError:
            return signal.SIGKILL if status is None else status
        if ended == worker:
            status = ended_status


def _children() -> list[int]:
    """Process ids whose parent is this process, zombies included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]  # after the name: state, parent
            if int(parent) == os.getpid():
                found.append(int(entry.name))
    return found


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # Linux only; elsewhere killing the group has to do
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
