"""What the training loop talks to: times phases, asks for memory peaks, hands results to the writer and the views."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from ullage.telemetry.metrics import reduce_values
from ullage.telemetry.run_directory import RunInfo
from ullage.telemetry.view import View, printable
from ullage.telemetry.writer import MetricsWriter

Record = Callable[[Mapping[str, float]], None]


class MemoryProbe(Protocol):
    """Measures the peak between two calls."""

    def start_phase(self) -> None:
        """Forget earlier peaks."""

    def end_phase(self) -> tuple[int, int, dict[str, int]]:
        """Peak of allocated bytes, peak of reserved bytes, and bytes by component."""


@dataclass(slots=True)
class _Peak:
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    components: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Ledger:
    """What was measured since the last line was written; what happens between two steps counts for the later one."""

    started: float
    metrics: dict[str, list[float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, _Peak] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)


class Recorder:
    """Times and memory of every phase, metrics of every step."""

    def __init__(
        self,
        writer: MetricsWriter,
        views: Sequence[View],
        memory: MemoryProbe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.current_step = 0
        self.current_phase: str | None = None
        """The phase the run is in; after an error, the one it happened in."""
        self.planned: Mapping[str, int] = {}
        """Bytes that each phase was planned to allocate."""
        self.peaks: dict[str, int] = {}
        """The most that each phase has allocated so far."""
        self.on_phase: Callable[[str | None], None] = lambda name: None
        """Hears which phase begins, or goes on; None: what is between phases."""
        self.on_step: Callable[[], None] = lambda: None
        """Hears that a step has ended, and ended well."""
        self._writer = writer
        self._views = list(views)
        self._memory = memory
        self._clock = clock
        self._ledger = _Ledger(clock())
        self._open: str | None = None
        self._opened = 0.0
        self._in_step = self._has_stepped = False

    def add_view(self, view: View) -> None:
        self._views.append(view)

    def start(self, info: RunInfo) -> None:
        """The run begins, or goes on."""
        self._show(lambda view: view.start(info))

    def stop(self) -> None:
        """The run is over, well or not: views give the terminal back, files are closed."""
        self._show(lambda view: view.stop())
        self._writer.close()

    @contextmanager
    def step(self, step: int) -> Iterator[Record]:
        """One training step; yields what metrics are given to. A step that fails leaves no line."""
        if not self._has_stepped:
            self._ledger = _Ledger(self._clock())  # loading is not part of the first step
        self.current_step, self.current_phase = step, None
        self._in_step = self._has_stepped = True
        try:
            yield self.record
            self._add({"time/step": self._clock() - self._ledger.started})
            self._write_line(step)
            self.on_step()
        finally:
            self._in_step = False
            self._ledger = _Ledger(self._clock())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Part of a step or of what is around steps; a phase inside another one pauses it."""
        outer = self._open
        self._switch(name)
        self.current_phase = name
        self._show(lambda view: view.phase(name, 0, 0, ""))
        try:
            yield
            self.current_phase = outer
        finally:
            self._switch(outer)

    def record(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the step; a name given several times is reduced as it is declared."""
        self._add(metrics)

    def progress(self, done: int, total: int, note: str = "") -> None:
        """How far the current phase is."""
        name = self.current_phase or ""
        self._show(lambda view: view.phase(name, done, total, note))

    def count_tokens(self, tokens: Mapping[str, float]) -> None:
        """Tokens each phase of the step worked through, over all ranks: its line says how many that is per second."""
        self._ledger.tokens |= tokens

    def event(self, text: str) -> None:
        """A line for the user, also kept in logs/events.log."""
        self._writer.event(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} step {self.current_step}: {printable(text)}")
        self._show(lambda view: view.event(text))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Results on held-out data: part of the step's line, or a line of their own outside a step."""
        self._add(metrics)
        if not self._in_step:
            self.current_step = step
            self._write_line(step)
            self._ledger = _Ledger(self._clock())

    def _add(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._ledger.metrics.setdefault(name, []).append(float(value))

    def _switch(self, name: str | None) -> None:
        """Close the account of the open phase and open the one of `name`."""
        now = self._clock()
        if self._open is not None:
            seconds, peaks = self._ledger.seconds, self._ledger.peaks
            seconds[self._open] = seconds.get(self._open, 0.0) + now - self._opened
            allocated, reserved, components = self._memory.end_phase()
            peak = peaks.setdefault(self._open, _Peak())
            if allocated >= peak.allocated_bytes:
                peak.allocated_bytes, peak.components = allocated, components
            peak.reserved_bytes = max(peak.reserved_bytes, reserved)
            self.peaks[self._open] = max(self.peaks.get(self._open, 0), allocated)
        if name is not None:
            self._memory.start_phase()
        if name != self._open:
            self.on_phase(name)
        self._open, self._opened = name, now

    def _write_line(self, step: int) -> None:
        if self._open is not None:
            self._switch(self._open)  # written from inside a phase: count what it has taken so far
        ledger = self._ledger
        metrics = {name: reduce_values(name, values) for name, values in ledger.metrics.items()}
        metrics |= {f"time/{phase}": seconds for phase, seconds in ledger.seconds.items()}
        metrics |= {
            f"{phase}/tokens_per_second": tokens / seconds
            for phase, tokens in ledger.tokens.items()
            if (seconds := ledger.seconds.get(phase, 0.0)) > 0
        }
        metrics |= {f"memory/{phase}_peak_bytes": float(peak.allocated_bytes) for phase, peak in ledger.peaks.items()}
        self._writer.step(step, metrics)
        for phase, peak in ledger.peaks.items():
            self._writer.memory(
                step,
                phase,
                allocated_peak_bytes=peak.allocated_bytes,
                reserved_peak_bytes=peak.reserved_bytes,
                components=peak.components,
                planned_bytes=self.planned.get(phase),
            )
        self._show(lambda view: view.step(step, metrics))

    def _show(self, call: Callable[[View], None]) -> None:
        for view in list(self._views):
            try:
                call(view)
            except Exception as error:  # noqa: BLE001 -- a closed terminal or a faulty view must not stop the training
                self._views.remove(view)
                self._writer.event(f"{type(view).__name__} stopped: {type(error).__name__}: {printable(str(error))}")
