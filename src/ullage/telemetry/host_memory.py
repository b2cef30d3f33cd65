"""Peak memory of this process as the operating system counts it: the probe of a run without an accelerator."""

import re
from contextlib import suppress
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_HIGH_WATER_MARK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


class HostMemory:
    """Resident memory: its high-water mark where Linux lets that be reset, else the larger end of a phase."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._at_start = 0
        self._was_reset = False

    def start_phase(self) -> None:
        self._at_start, self._was_reset = self._resident(), False
        with suppress(OSError):
            _CLEAR_REFS.write_text("5")  # proc(5): resets the peak to the present size
            self._was_reset = True

    def end_phase(self) -> tuple[int, int, dict[str, int]]:
        peak = max(self._at_start, self._resident(), self._high_water_mark() if self._was_reset else 0)
        return peak, peak, {}

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)

    def _high_water_mark(self) -> int:
        found = _HIGH_WATER_MARK.search(_STATUS.read_text())
        return int(found.group(1)) * 1024 if found else 0
