"""Measured memory on a CPU: a phase's peak is seen, and does not leak into the next phase."""

from pathlib import Path

import pytest
import torch

from experience_samples import CPU
from ullage.engine.measure import MemoryProbe

MIB = 1 << 20


def test_components_are_what_was_registered():
    probe = MemoryProbe(CPU)
    probe.register("weights", 10)
    probe.register("kv_cache", 20)
    probe.register("weights", 30)
    probe.start_phase()
    allocated, reserved, components = probe.end_phase()
    assert components == {"weights": 30, "kv_cache": 20}
    assert allocated == reserved > 10 * MIB


def _can_reset():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def test_a_peak_belongs_to_its_phase():
    if not _can_reset():
        pytest.skip("this kernel does not let a process reset its high-water mark")
    probe = MemoryProbe(CPU)
    probe.start_phase()
    quiet = probe.end_phase()[0]
    probe.start_phase()
    torch.ones(256 * MIB // 4)
    loud = probe.end_phase()[0]
    probe.start_phase()
    after = probe.end_phase()[0]
    assert loud - quiet > 200 * MIB
    assert after - quiet < 100 * MIB


def test_without_proc_the_resident_size_is_reported(monkeypatch):
    def missing(self, *args, **kwargs):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(Path, "write_text", missing)
    probe = MemoryProbe(CPU)
    probe.start_phase()
    assert probe.end_phase()[0] > 10 * MIB
