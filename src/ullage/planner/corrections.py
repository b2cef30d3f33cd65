"""What earlier runs on this machine measured against their plans, kept in a small file that corrects the next plan."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ullage.base.errors import WriteError
from ullage.telemetry.run_directory import write_atomically

KEPT = 8
"""Newest runs of a place that are remembered."""
LARGEST = 4.0
"""A plan that is further off than this is wrong, not imprecise: no factor mends it."""
LEAST_BYTES = 1 << 30
"""In smaller phases fixed costs weigh more than what grows with the model: their ratio says nothing about others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a correction holds for: it is of no use under another driver, torch or way of training."""

    device: str
    driver: str
    torch: str
    kind: str
    """`full`, `lora` or the quantisation under the adapters."""

    @property
    def name(self) -> str:
        return f"{self.device} | driver {self.driver} | torch {self.torch} | {self.kind}"


class Corrections:
    """The file, which need not exist, be readable or be whole."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or _cache_folder() / "ullage" / "corrections.json"

    def scale(self, place: Place) -> dict[str, float]:
        """Measured over planned by phase, the largest of the newest runs; ValueError: the file is damaged.

        Never below 1: a batch shorter than planned measures less, and the next one may be as long as planned.
        """
        found: dict[str, float] = {}
        for ratios in self._runs().get(place.name, []):
            for phase, ratio in ratios.items():
                found[phase] = max(found.get(phase, 1.0), min(ratio, LARGEST))
        return {phase: ratio for phase, ratio in found.items() if ratio > 1.0}

    def remember(self, place: Place, ratios: Mapping[str, float]) -> None:
        """Add a run, and forget the oldest beyond those that are kept. WriteError: the folder cannot be written."""
        try:
            runs = self._runs()
        except ValueError:
            runs = {}
        runs[place.name] = [*runs.get(place.name, []), dict(ratios)][-KEPT:]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(f"cannot write {self.path}: {error.strerror}", "set XDG_CACHE_HOME elsewhere") from None
        write_atomically(self.path, json.dumps(runs, indent=1) + "\n")

    def _runs(self) -> dict[str, list[dict[str, float]]]:
        """By the name of their place, the oldest first."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except OSError:
            return {}
        found = json.loads(text)
        if not isinstance(found, dict) or not all(_is_runs(runs) for runs in found.values()):
            raise ValueError("not a mapping from places to runs")
        return found


def _is_runs(value: Any) -> bool:  # noqa: ANN401 -- whatever the file holds
    return isinstance(value, list) and all(isinstance(run, dict) and all(map(_is_ratio, run.values())) for run in value)


def _is_ratio(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _cache_folder() -> Path:
    """Where the user's caches are; a relative path is to be ignored (XDG base directory specification)."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
