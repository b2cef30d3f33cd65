"""The folder of one run: where each file lives, who may write there, and text that is never half-written."""

import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from ullage.base.errors import ConfigError, UsageError, WriteError
from ullage.telemetry.lock import RunLock

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")
_RESERVED_ON_WINDOWS = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_ADJECTIVES = "bold brave bright brisk calm clever deep eager gentle keen lucid merry nimble quiet swift vivid wise"
_ANIMALS = "badger crane falcon finch gecko heron ibex lynx marten otter owl puffin raven seal stoat swan tern wren"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What a reader or a view wants to know about a run before its first step."""

    name: str
    algorithm: str
    model: str
    total_steps: int
    created_at: float
    """Seconds since 1970."""
    capacity_bytes: int | None = None
    """Memory of the device that trains, where it is known."""


class RunDirectory:
    """`<root>/<name>/` and the files in it; one process writes, any number read."""

    def __init__(self, root: Path, name: str | None = None) -> None:
        self.name = check_name(name) if name is not None else make_name()
        self.path = Path(root) / self.name
        self.lock = RunLock(self.path / "lock")

    @classmethod
    def open_existing(cls, path: Path) -> Self:
        """The run in `path`. Nothing is written and the lock is not taken."""
        path = Path(path).expanduser().resolve()
        if not path.is_dir() or not ((path / "run.json").is_file() or (path / "resolved.yaml").is_file()):
            raise UsageError(f"no run in {path}", "`ullage ls` lists the runs; give the path of one of them")
        directory = cls.__new__(cls)
        directory.name, directory.path, directory.lock = path.name, path, RunLock(path / "lock")
        return directory

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def resolved(self) -> Path:
        return self.path / "resolved.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def info(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def memory(self) -> Path:
        return self.path / "memory.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def events(self) -> Path:
        return self.logs / "events.log"

    @property
    def exit(self) -> Path:
        return self.path / "exit.json"

    def samples_of(self, step: int) -> Path:
        return self.samples / f"step_{step}.jsonl"

    def evaluation_of(self, step: int) -> Path:
        return self.samples / f"eval_{step}.jsonl"

    def checkpoint_of(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def create(self) -> None:
        """Make the folder and take its lock; an existing run or a folder that cannot be written is refused."""
        absent = [folder for folder in self.path.parents if not folder.exists()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except OSError as error:
            if os.path.lexists(self.path):
                raise WriteError(
                    f"the run {self.path} already exists",
                    f"give another trainer.experiment_name, or continue it: ullage resume {self.path}",
                ) from None
            _remove_empty(absent)
            raise _unwritable(self.path, error.strerror) from None
        try:
            for folder in (self.samples, self.checkpoints, self.logs):
                folder.mkdir()
            self.lock.acquire()
        except OSError as error:
            shutil.rmtree(self.path, ignore_errors=True)
            _remove_empty(absent)
            raise _unwritable(self.path, error.strerror) from None

    def reopen(self) -> None:
        """Take the lock of an existing run to continue it; its earlier outcome no longer holds."""
        try:
            self.lock.acquire()
            for folder in (self.samples, self.checkpoints, self.logs):
                folder.mkdir(exist_ok=True)
            self.exit.unlink(missing_ok=True)
        except OSError as error:
            self.lock.release()
            raise _unwritable(self.path, error.strerror) from None

    def close(self) -> None:
        """Give the lock back."""
        self.lock.release()

    def write_info(self, info: RunInfo) -> None:
        write_atomically(self.info, json.dumps(asdict(info), indent=2) + "\n")


def check_name(name: str) -> str:
    """The name itself, if it is one that can be a folder on any system and cannot leave the root."""
    if not _NAME.fullmatch(name) or _RESERVED_ON_WINDOWS.fullmatch(name) or name.endswith("."):
        raise ConfigError(
            f"trainer.experiment_name = {name!r} cannot be the name of a run folder",
            "use letters, digits, '_', '-' and '.', starting with a letter or digit, at most 80 characters",
        )
    return name


def make_name() -> str:
    """A name for a run that was given none, such as `brave-otter-3f9a`."""
    return "-".join((secrets.choice(_ADJECTIVES.split()), secrets.choice(_ANIMALS.split()), secrets.token_hex(2)))


def write_atomically(path: Path, text: str) -> None:
    """Write beside the file, sync, rename: a reader sees the old text or the new one, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise _unwritable(path, error.strerror) from None


def _unwritable(path: Path, reason: str | None) -> WriteError:
    return WriteError(
        f"cannot write {path}: {reason or 'unknown error'}",
        "make the folder writable and check free space, or set trainer.default_local_dir to another place",
    )


def _remove_empty(folders: list[Path]) -> None:
    """Undo the parents of a run that could not be made, innermost first; one that holds anything stays."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
