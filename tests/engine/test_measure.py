"""Measured memory on a CPU: a phase's peak is seen, and does not leak into the next phase."""

import subprocess
import sys
from pathlib import Path

import pytest

from experience_samples import CPU
from ullage.engine.measure import MemoryProbe

MIB = 1 << 20


def test_what_no_owner_holds_is_the_phases_own(monkeypatch):
    probe = MemoryProbe(CPU)
    probe.register("weights", 10)
    probe.register("kv_cache", 20)
    probe.register("weights", 30)
    context = probe.owners["context"]  # the interpreter and its libraries
    assert context > 10 * MIB
    known = {"context": context, "weights": 30, "kv_cache": 20}
    for peak, activations in ((context + 1050, 1000), (context + 60, 10), (context, 0)):
        monkeypatch.setattr("ullage.engine.measure._resident_peak", lambda peak=peak: peak)
        probe.start_phase()
        assert probe.end_phase() == (peak, peak, known | {"activations": activations})
    assert probe.highest == known | {"activations": 1000}


def _can_reset():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


PHASES = """
import torch
from ullage.engine.measure import MemoryProbe
from ullage.model.target import Target

probe = MemoryProbe(Target("cpu", 0, (0, 0), 0))
peaks = []
for size in (1, 64 << 20, 1):
    probe.start_phase()
    torch.ones(size)
    peaks.append(probe.end_phase()[0])
print(*peaks)
"""


def test_a_peak_belongs_to_its_phase():
    if not _can_reset():
        pytest.skip("this kernel does not let a process reset its high-water mark")
    # A fresh process: in this one, memory that other tests gave back to the allocator may be used again.
    out = subprocess.run([sys.executable, "-c", PHASES], capture_output=True, text=True, check=True).stdout
    quiet, loud, after = map(int, out.split())
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
