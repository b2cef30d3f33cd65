"""Checkpoints on disk: written aside, hashed, synced, renamed into place, verified before use, pruned last.

    root/step_N/<name>.safetensors   one file per entry of `tensors`, e.g. the optimizer
    root/step_N/model/               whatever `extra_files` writes, e.g. a Hugging Face folder
    root/step_N/state.json           everything that is not a tensor
    root/step_N/manifest.json        written last: sizes, hashes, dtypes, shapes, versions, facts
    root/latest                      a line of text: the name of the newest folder
    root/.tmp-step_N.<pid>           being written or being removed; never read

No format detects a flipped bit by itself, hence the hashes. Nothing here can execute what it reads: tensors are
safetensors, the rest is JSON, and files the manifest does not name are not opened.
"""

import errno
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ullage import __version__
from ullage.base.errors import WriteError
from ullage.base.units import bytes_text

SCHEMA = 1
MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
READ_BYTES = 1 << 22

# A step written twice leaves the older folder as `step_N.replaced` until the newer one is in place.
FOLDER_NAME = re.compile(r"step_(\d+)(\.replaced)?")
TEMPORARY_NAME = re.compile(r"\.tmp-.+\.(\d{1,9})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What one checkpoint folder holds."""

    folder: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    facts: dict[str, Any]


def write_checkpoint(
    root: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: dict[str, Any],
    extra_files: Callable[[Path], None] | None = None,
    facts: dict[str, Any],
) -> Path:
    """Publish `root/step_N`: complete and synced or not there at all. Older checkpoints are left alone."""
    target = root / f"step_{step}"
    temporary = root / f".tmp-step_{step}.{os.getpid()}"
    with _writing(target, tensors):
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        require_free_space(root, _expected_bytes(root, tensors))
        try:
            temporary.mkdir()
            for name, group in tensors.items():
                save_file(
                    {key: value.detach().contiguous() for key, value in group.items()}, _tensor_file(temporary, name)
                )
            if extra_files is not None:
                extra_files(temporary)
            (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
            _write_manifest(temporary, step, sorted(tensors), facts)
            _publish(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already when it was published
        _write_latest(root, target.name)
    return target


def verify(folder: Path) -> list[str]:
    """Everything wrong with a checkpoint, one line each; an empty list means it is what was written."""
    try:
        manifest = _read_manifest(folder)
    except WriteError as error:
        return [error.cause]
    problems = []
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif path.stat().st_size != expected["bytes"]:
            problems.append(f"{path}: {path.stat().st_size} bytes, {expected['bytes']} were written")
        elif _hash(path) != expected["xxh3_128"]:
            problems.append(f"{path}: content differs from what was written")
    return problems


def latest_verified(root: Path) -> tuple[Path, list[str]] | None:
    """The checkpoint to resume from, and what was wrong with those passed over; None if there is none to use.

    `latest` decides, since a run set back to an earlier step may have later folders beside it; where it is of no use,
    the highest step that verifies is taken.
    """
    folders = checkpoints(root)
    warnings = []
    named = _named_by_latest(root)
    if named is not None:
        folders = [named, *(folder for folder in folders if folder != named)]
    elif folders:
        warnings.append(f"{root / LATEST} names no checkpoint; looking at the folders themselves")
    for folder in folders:
        problems = verify(folder)
        if not problems:
            return folder, warnings
        warnings.extend(f"damaged checkpoint: {problem}" for problem in problems)
    return None


def continue_from(folder: Path) -> None:
    """Make this checkpoint the one `latest_verified` looks at first; later steps are replaced as the run goes on."""
    with _writing(folder, {}):
        _write_latest(folder.parent, folder.name)


def read_checkpoint(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """Load a checkpoint that `verify` found whole; its tensors go to `device`."""
    manifest = _read_manifest(folder)
    try:
        return Checkpoint(
            folder=folder,
            step=manifest["step"],
            tensors={name: load_file(_tensor_file(folder, name), device=str(device)) for name in manifest["groups"]},
            state=json.loads((folder / STATE).read_text(encoding="utf-8")),
            facts=manifest["facts"],
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise WriteError(
            f"damaged checkpoint {folder}: {error}", "resume from another checkpoint of this run"
        ) from error


def prune(root: Path, keep: int, protect: set[Path]) -> list[str]:
    """Remove all but the `keep` newest checkpoints, those in `protect`, and the newest that verifies.

    Call it only after a new checkpoint is published. A folder that cannot be removed is a warning, not a failure.
    """
    folders = checkpoints(root)
    spared = {folder.resolve() for folder in protect} | {folder.resolve() for folder in folders[:keep]}
    spared.add((_named_by_latest(root) or root).resolve())
    doomed = [folder for folder in folders if folder.resolve() not in spared]
    if doomed:
        newest_whole = next((folder for folder in folders if not verify(folder)), None)
        doomed = [folder for folder in doomed if folder != newest_whole]
    warnings = []
    for folder in doomed:
        try:
            _remove(folder)
        except OSError as error:
            warnings.append(f"could not remove old checkpoint {folder}: {error.strerror or error}")
    return warnings


def checkpoints(root: Path) -> list[Path]:
    """Published checkpoint folders, whole or damaged, newest step first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = FOLDER_NAME.fullmatch(path.name)
        succeeded = path.suffix == ".replaced" and path.with_suffix("").is_dir()
        if match and path.is_dir() and not succeeded:
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def require_free_space(root: Path, needed_bytes: int) -> None:
    """Raise unless the disk that holds `root` has room for `needed_bytes` more."""
    free_bytes = _free_bytes(root)
    if free_bytes < needed_bytes:
        raise _disk_full(root, needed_bytes, free_bytes)


def remove_leftovers(root: Path) -> None:
    """Remove what dead processes, or an earlier failure of this one, left half written or half removed in `root`."""
    for path in list(root.iterdir()):
        temporary, folder = TEMPORARY_NAME.fullmatch(path.name), FOLDER_NAME.fullmatch(path.name)
        orphaned = temporary and (int(temporary[1]) == os.getpid() or not psutil.pid_exists(int(temporary[1])))
        succeeded = folder and folder[2] and path.with_suffix("").is_dir()
        if path.is_file() and orphaned:
            path.unlink()
        elif orphaned or succeeded:
            shutil.rmtree(path, ignore_errors=True)


def _tensor_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _expected_bytes(root: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Disk a checkpoint will take: its tensors, or the size of the previous one, which also had a model in it."""
    needed_bytes = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    for folder in checkpoints(root)[:1]:
        needed_bytes = max(needed_bytes, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    return needed_bytes


def _free_bytes(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _disk_full(place: Path, needed_bytes: int, free_bytes: int) -> WriteError:
    return WriteError(
        f"disk full, need {bytes_text(needed_bytes)}, have {bytes_text(free_bytes)}: {place}",
        "free some space or lower trainer.max_ckpt_to_keep, then resume; the checkpoints already written are intact",
    )


@contextmanager
def _writing(target: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> Iterator[None]:
    """Turn what the operating system says about a failed write into what a user can do about it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors reports the system's error only as text: "... (os error 28)".
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (match := re.search(r"os error (\d+)", str(error))):
            number = int(match[1])
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(target, _expected_bytes(target.parent, tensors), _free_bytes(target)) from error
        reason = os.strerror(number) if number else str(error)
        raise WriteError(
            f"cannot write checkpoint {target}: {reason}", "make the folder writable or set trainer.default_local_dir"
        ) from error


def _write_manifest(folder: Path, step: int, groups: list[str], facts: dict[str, Any]) -> None:
    files: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        _sync(path)
        entry: dict[str, Any] = {"bytes": path.stat().st_size, "xxh3_128": _hash(path)}
        if path.suffix == ".safetensors":
            entry["tensors"] = _tensor_shapes(path)
        files[path.relative_to(folder).as_posix()] = entry
    packages = ("torch", "transformers", "safetensors")
    manifest = {
        "schema": SCHEMA,
        "step": step,
        "groups": groups,
        "files": files,
        "facts": facts,
        "versions": {
            "ullage": __version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }
    manifest = json.loads(json.dumps(manifest))  # tuples and number keys as they will be read back
    manifest["self"] = _self_hash(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync(folder / MANIFEST)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync(path)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    remedy = "resume from another checkpoint of this run"
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise WriteError(f"{path}: missing", remedy) from None
    except (OSError, ValueError) as error:
        raise WriteError(f"{path}: unreadable ({error})", remedy) from error
    if not isinstance(manifest, dict) or manifest.pop("self", None) != _self_hash(manifest):
        raise WriteError(f"{path}: content differs from what was written", remedy)
    if manifest["schema"] != SCHEMA:
        raise WriteError(
            f"{path}: checkpoint format {manifest['schema']}, this Ullage {__version__} reads format {SCHEMA}",
            f"use Ullage {manifest['versions']['ullage']}, which wrote it",
        )
    return manifest


def _self_hash(manifest: dict[str, Any]) -> str:
    """Hash of the manifest without its own hash, so that damage to the manifest shows as well."""
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _tensor_shapes(path: Path) -> dict[str, dict[str, Any]]:
    """Dtype and shape of every tensor, from the file's header: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {
        name: {"dtype": entry["dtype"], "shape": entry["shape"]}
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(temporary: Path, target: Path) -> None:
    """Rename into place; an older folder of the same step steps aside first, where it can still be found."""
    replaced = target.with_name(target.name + ".replaced")
    if target.exists():
        target.rename(replaced)
    temporary.rename(target)
    _sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced, ignore_errors=True)


def _write_latest(root: Path, name: str) -> None:
    temporary = root / f".tmp-{LATEST}.{os.getpid()}"
    temporary.write_text(name + "\n", encoding="utf-8")
    _sync(temporary)
    temporary.replace(root / LATEST)
    _sync(root)


def _named_by_latest(root: Path) -> Path | None:
    try:
        name = (root / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = root / name
    return folder if FOLDER_NAME.fullmatch(name) and folder.is_dir() else None


def _remove(folder: Path) -> None:
    """Delete a checkpoint so that one killed half way is never taken for a damaged checkpoint."""
    doomed = folder.with_name(f".tmp-{folder.name}.{os.getpid()}")
    folder.rename(doomed)
    shutil.rmtree(doomed)
