"""The peak of a phase is seen although the memory is gone at its end, and forgotten by the next phase."""

import mmap
from pathlib import Path

import pytest

from ullage.telemetry.host_memory import HostMemory

SIZE = 64 << 20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")
def test_a_peak_belongs_to_its_phase():
    probe = HostMemory()
    probe.start_phase()
    quiet, _, components = probe.end_phase()
    probe.start_phase()
    with mmap.mmap(-1, SIZE) as block:
        block.write(b"x" * SIZE)
    loud, reserved, _ = probe.end_phase()
    probe.start_phase()
    after, _, _ = probe.end_phase()
    assert loud - quiet >= SIZE
    assert reserved == loud
    assert loud - after >= SIZE // 2
    assert components == {}
