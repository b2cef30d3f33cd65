"""The memory benchmark's file of JSON lines: appended to, never rewritten, so that a bench can be stopped and go on."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import ullage
from ullage.base.errors import WriteError
from ullage.telemetry.reader import read_lines

DRAWN, PREDICTED, MEASURED, CAP = "drawn", "predicted", "measured", "cap"


class Records:
    """What is known so far. Every line is on the disk before the next thing happens; a torn last line never was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = [row for row in read_lines(path) if "kind" in row]

    def append(self, kind: str, row: dict[str, Any]) -> None:
        record = {"kind": kind, **row}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                torn = file.seek(0, os.SEEK_END) > 0 and _last_byte(file) != b"\n"
                file.write(b"\n" * torn + json.dumps(record, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WriteError(f"cannot write {self.path}: {error.strerror}", "give another file with --out") from None
        self.rows.append(record)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind]

    def find(self, kind: str, key: str) -> dict[str, Any] | None:
        return next((row for row in self.of(kind) if row["key"] == key), None)


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def provenance() -> dict[str, Any]:
    """Which code and which libraries made a record, whatever a version control system calls it."""
    root = Path(ullage.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    versions = {"ullage": ullage.__version__}
    for package in ("torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"code": digest.hexdigest()[:16], "versions": versions}
