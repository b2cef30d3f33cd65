"""The lock of a run: one process writes it; the lock of a process that died is taken over."""

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ullage.base.errors import WriteError

# A process that started this much later than the lock was taken is another one that got the same number.
_CLOCK_SLACK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock."""

    pid: int
    host: str
    taken_at: float

    def is_alive(self) -> bool:
        """False only where it is certain: this machine, and no such process any more."""
        import psutil  # only somebody else's lock needs it

        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return bool(process.create_time() <= self.taken_at + _CLOCK_SLACK_SECONDS)
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True


def read_owner(path: Path) -> Owner | None:
    """Who the lock file names; None where there is none or it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Owner(int(value["pid"]), str(value["host"]), float(value["taken_at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class RunLock:
    """A file that names its owner. A file and not `flock`, which forked workers of a killed run would keep held."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mine: Owner | None = None

    def acquire(self) -> None:
        """Take the lock, or refuse with the name of the process that has it."""
        mine = Owner(os.getpid(), socket.gethostname(), time.time())
        for _ in range(3):  # a stale lock is removed, then the race for the free place is run again
            try:
                with self.path.open("x", encoding="utf-8") as file:
                    json.dump(asdict(mine), file)
            except FileExistsError:
                self._remove_stale()
            else:
                self._mine = mine
                return
        raise _held(self.path, read_owner(self.path))

    def release(self) -> None:
        """Give the lock back; a forked child of the owner changes nothing."""
        if self._mine is not None and self._mine.pid == os.getpid() and read_owner(self.path) == self._mine:
            with suppress(OSError):
                self.path.unlink()
        self._mine = None

    def _remove_stale(self) -> None:
        owner = read_owner(self.path)
        if owner.is_alive() if owner else _is_young(self.path):
            raise _held(self.path, owner)
        grave = self.path.with_name(f".lock.{secrets.token_hex(6)}")
        with suppress(FileNotFoundError):  # another process was faster: the next try finds its lock
            self.path.rename(grave)
            buried = read_owner(grave)
            if buried != owner:  # somebody took over between reading and renaming: put theirs back
                grave.rename(self.path)
                raise _held(self.path, buried)
            grave.unlink()


def _is_young(path: Path) -> bool:
    """Whether a lock without a readable owner may still be in the middle of being written."""
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime < _CLOCK_SLACK_SECONDS
    return False


def _held(path: Path, owner: Owner | None) -> WriteError:
    who = f"process {owner.pid} on {owner.host}" if owner else "another process"
    return WriteError(
        f"the run {path.parent} is being written by {who}",
        f"wait for it or stop it; if it is certainly gone, delete {path}",
    )
