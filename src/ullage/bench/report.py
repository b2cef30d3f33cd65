"""What a benchmark found, beside where and with what: tables for people, a JSON file for the record."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from ullage.model.target import Target
from ullage.telemetry.run_directory import write_atomically

GIB = 1 << 30


def surroundings(target: Target) -> dict[str, Any]:
    """Hardware and versions."""
    hardware: dict[str, Any] = {
        "cpu_cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "machine": platform.machine(),
    }
    if target.kind == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(target.device)
        hardware["gpu_memory_gib"] = round(target.memory_bytes / GIB, 1)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "triton", "trl"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"date": datetime.now(UTC).date().isoformat(), "hardware": hardware, "versions": versions}


def write(path: Path, target: Target, command: str, rows: Mapping[str, Any]) -> None:
    """One JSON file with everything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"command": command, **surroundings(target), **rows}, indent=1) + "\n")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the same keys as aligned columns."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
