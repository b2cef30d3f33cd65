"""Weights as a Hugging Face folder, or their adapter as a PEFT folder, that is complete or not there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ullage.base.errors import ModelError, WriteError


def export_model(weights: str, out: Path, *, dtype: str | None = None) -> None:
    """Write the model `weights` names to the new folder `out`: bit for bit, or in another dtype, or merged."""
    from ullage.model.adapter_files import is_adapter_folder

    if dtype is None and Path(weights).is_dir() and not is_adapter_folder(weights):
        _write(out, lambda aside: _copy_model(Path(weights), aside))
    else:
        _write(out, lambda aside: _convert(weights, aside, dtype))


def export_adapter(weights: str, out: Path) -> None:
    """Write the adapter of a checkpoint, or of a run's `final/`, to the new folder `out`, bit for bit."""
    from ullage.model.adapter_files import is_adapter_folder

    folder = Path(weights) if is_adapter_folder(weights) else Path(weights) / "adapter"
    if not is_adapter_folder(folder):
        raise ModelError(
            f"{weights} has no adapter", "leave --adapter out, or choose a run with actor_rollout_ref.model.lora_rank"
        )
    _write(out, lambda aside: _copy(folder, aside))


def _write(out: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder aside, then put it in its place."""
    if os.path.lexists(out):
        raise WriteError(f"{out} already exists", "give another name, or remove it first")
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            fill(aside)
            _publish(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # gone already when it was published
    except OSError as error:
        raise WriteError(
            f"cannot write {out}: {error.strerror or error}", "make the folder writable and check free space"
        ) from None


def _copy_model(folder: Path, aside: Path) -> None:
    from ullage.model.load import load_tokenizer

    load_tokenizer(str(folder))  # a folder without one would not be a model that others can use
    _copy(folder, aside)


def _copy(folder: Path, aside: Path) -> None:
    aside.mkdir()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            shutil.copyfile(path, aside / path.name)


def _convert(weights: str, aside: Path, dtype: str | None) -> None:
    from ullage.model.adapter_files import is_adapter_folder, stored_dtype
    from ullage.model.load import load_model
    from ullage.model.target import find_target

    if dtype is None:
        dtype = stored_dtype(Path(weights)) if is_adapter_folder(weights) else "float32"
    load_model(weights, find_target("cpu", 0), dtype=dtype).save_merged(aside)


def _publish(aside: Path, out: Path) -> None:
    """Sync, then rename."""
    for path in aside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if os.path.lexists(out):  # since the check at the start
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    aside.rename(out)
