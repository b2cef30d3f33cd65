"""Peaks predicted from traces on fake tensors against peaks measured on an H200."""

import json
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))

import check_memory  # noqa: E402 -- a script beside its data, not a package

ROWS = {row["id"]: row for row in json.loads((GOLDEN / "memory_h200.json").read_text())["rows"]}
# 16 layers; one in fp32 under autocast, one in bf16 with recompute and capped runs.
FEW = (10, 42)


@pytest.mark.parametrize("row", FEW)
def test_peaks_of_a_few_measured_rows(row):
    peaks, traced = check_memory.predict(ROWS[row])
    errors = check_memory.errors(ROWS[row], peaks)
    assert {phase: error for phase, error in errors.items() if abs(error) > 0.0003} == {}
    assert all(right for _, _, right, _ in check_memory.capped(ROWS[row], traced))


def test_two_shallow_depths_agree_with_the_measured_model():
    errors = check_memory.errors(ROWS[10], check_memory.predict_shallow(ROWS[10]))
    assert {phase: error for phase, error in errors.items() if abs(error) > 0.0003} == {}


@pytest.mark.slow
def test_every_measured_row():
    errors, sides = [], []
    for row in ROWS.values():
        peaks, traced = check_memory.predict(row)
        errors.append(abs(check_memory.errors(row, peaks)["peak"]))
        sides += [right for _, _, right, _ in check_memory.capped(row, traced)]
    assert sum(errors) / len(errors) <= check_memory.MEAN_LIMIT
    assert max(errors) <= check_memory.WORST_LIMIT
    assert sides == [True] * 6
