"""Weights as a Hugging Face folder that is complete or not there."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from ullage.base.errors import WriteError


def export_model(weights: str, out: Path, *, dtype: str | None = None) -> None:
    """Write the model `weights` names to the new folder `out`: bit for bit, or in another dtype."""
    if os.path.lexists(out):
        raise WriteError(f"{out} already exists", "give another name, or remove it first")
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            if dtype is None and Path(weights).is_dir():
                _copy(Path(weights), aside)
            else:
                _convert(weights, aside, dtype)
            _publish(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # gone already when it was published
    except OSError as error:
        raise WriteError(
            f"cannot write {out}: {error.strerror or error}", "make the folder writable and check free space"
        ) from None


def _copy(folder: Path, aside: Path) -> None:
    from ullage.model.load import load_tokenizer

    load_tokenizer(str(folder))  # a folder without one would not be a model that others can use
    aside.mkdir()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            shutil.copyfile(path, aside / path.name)


def _convert(weights: str, aside: Path, dtype: str | None) -> None:
    from ullage.model.load import load_model
    from ullage.model.target import find_target

    load_model(weights, find_target("cpu", 0), dtype=dtype or "float32").save(aside)


def _publish(aside: Path, out: Path) -> None:
    """Sync, then rename."""
    for path in aside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if os.path.lexists(out):  # since the check at the start
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    aside.rename(out)
