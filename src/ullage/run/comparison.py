"""What a run measured beside what was planned: told at its end, kept in plan.json, remembered for the next plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress

from ullage.base.errors import WriteError
from ullage.base.units import bytes_text
from ullage.model.target import Target
from ullage.planner.corrections import LEAST_BYTES, Corrections
from ullage.run.machine import place_of
from ullage.run.planned import Planned
from ullage.run.planning import MEASURED
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.run_directory import RunDirectory, write_atomically
from ullage.telemetry.writer import json_text

NOTHING: Mapping[str, int] = {}


def compare(
    planned: Planned,
    recorder: Recorder,
    directory: RunDirectory,
    target: Target,
    brought: Mapping[str, int] = NOTHING,
) -> None:
    """Of one rank, however the run ended. Fails at nothing: the run's own outcome is what counts.

    Args:
        brought: bytes of the next phase's weights that came while a phase ran, into room that it left.
    """
    known = {name: recorder.peaks[name] for name in planned.bytes if recorder.peaks.get(name)}
    peaks = {name: peak - brought.get(name, 0) for name, peak in known.items()}
    if not peaks:
        return
    measured = {
        name: {
            "planned_bytes": planned.bytes[name],
            "allocated_peak_bytes": peak,
            "error_percent": round(100 * (planned.bytes[name] / peak - 1), 2),
        }
        for name, peak in peaks.items()
    }
    with suppress(WriteError, OSError, ValueError):  # a full disk, a folder that is gone
        for line in table(measured, of_tensors=target.kind != "cpu"):
            recorder.event(line)
        document = json.loads(directory.plan.read_text(encoding="utf-8")) | {"measured": measured}
        write_atomically(directory.plan, json_text(document, indent=2) + "\n")
    place, ratios = place_of(target, planned.config), corrections(planned, peaks)
    if place is not None and ratios:
        try:
            Corrections().remember(place, ratios)
        except WriteError as error:
            with suppress(WriteError):
                recorder.event(f"not remembered for the next plan: {error.cause}")


def table(measured: Mapping[str, Mapping[str, float]], *, of_tensors: bool) -> list[str]:
    """On a CPU what is measured is the process, which keeps what it once had: no measure of a plan of tensors."""
    found = "measured, error of the plan" if of_tensors else "and the whole process as it was"
    lines = [f"memory by phase: planned for sequences of full length, {found}"]
    for name, row in measured.items():
        sizes = f"{bytes_text(row['planned_bytes']):>10} {bytes_text(row['allocated_peak_bytes']):>10}"
        lines.append(f"  {name:<14}{sizes}" + (f" {row['error_percent']:>+7.1f} %" if of_tensors else ""))
    return lines


def corrections(planned: Planned, peaks: Mapping[str, int]) -> dict[str, float]:
    """Measured over what the formulas said before they were corrected, of phases that are large enough to tell."""
    found = {}
    for name, peak in peaks.items():
        scale = max((planned.scale.get(part, 1.0) for part in MEASURED.get(name, ())), default=1.0)
        if planned.bytes[name] >= LEAST_BYTES:
            found[name] = round(scale * peak / planned.bytes[name], 4)
    return found
