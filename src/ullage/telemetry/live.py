"""The live view: one small block at the bottom of the terminal, redrawn four times a second."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ullage.base.units import bytes_text, seconds_text
from ullage.telemetry.run_directory import RunInfo
from ullage.telemetry.view import FAILED, History, encodable, number_text, printable

_LABEL_WIDTH = 9


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of the picture: blocks, or their stand-ins where the terminal cannot write them."""

    levels: str = "▁▂▃▄▅▆▇█"
    full: str = "█"
    empty: str = "░"
    now: str = "▶"
    dot: str = "·"

    @classmethod
    def for_stream(cls, stream: TextIO) -> "Glyphs":
        blocks = cls()
        text = blocks.levels + blocks.full + blocks.empty + blocks.now + blocks.dot
        return blocks if encodable(text, stream) == text else cls("_.-=+*%#", "#", ".", ">", "-")


def sparkline(values: Sequence[float], width: int, levels: str) -> str:
    """The whole history in at most `width` characters: means of equal slices, between the smallest and the largest."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return levels[0] * count
    return "".join(levels[round((mean - low) / (high - low) * (len(levels) - 1))] for mean in means)


def bar(fraction: float, width: int, glyphs: Glyphs) -> str:
    filled = round(min(1.0, max(0.0, fraction)) * width)
    return glyphs.full * filled + glyphs.empty * (width - filled)


class LiveView:
    """A view of at most 12 rows, on the stream that is not for data."""

    def __init__(self, stream: TextIO, *, color: bool = True) -> None:
        self._stream = stream
        self._glyphs = Glyphs.for_stream(stream)
        self._history = History()
        self._phase = ("", 0, 0, "")
        self._phase_began = time.monotonic()
        self._console = Console(
            file=stream, force_terminal=True, no_color=not color, highlight=False, markup=False, emoji=False
        )
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=4,
            vertical_overflow="crop",
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )

    def start(self, info: RunInfo) -> None:
        self._history.info = info
        self._live.start()

    def phase(self, name: str, done: int, total: int, note: str) -> None:
        if name != self._phase[0]:
            self._phase_began = time.monotonic()
        self._phase = (name, done, total, note)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._history.add(step, metrics)

    def event(self, text: str) -> None:
        self._console.print(Text(encodable(printable(text), self._stream)), soft_wrap=True)

    def stop(self) -> None:
        self._phase = ("", 0, 0, "")
        self._live.stop()

    def _render(self) -> Group:
        return self.render(self._console.width)

    def render(self, width: int) -> Group:
        """The picture at this width; every row is cut, never wrapped."""
        rows = [self._header(width), self._now(width), *self._cells(width), self._phases(width), self._memory(width)]
        shown = [row for row in rows if row.plain]
        for row in shown:
            row.truncate(width, overflow="crop")
        return Group(*shown)

    def _header(self, width: int) -> Text:
        history, dot = self._history, self._glyphs.dot
        if history.info is None:
            return Text("")
        total = history.info.total_steps
        progress = f"step {history.step}/{total}  {history.step / max(1, total):.0%}"
        seconds, left = history.seconds_per_step(), history.seconds_left()
        if seconds is not None and left is not None:
            progress += f"  {seconds:.1f} s/step  ETA {seconds_text(left)}"
        names = f"{history.info.algorithm} {dot} {history.info.model} {dot} {history.info.name}"
        names = encodable(printable(names), self._stream)
        room = max(0, width - len(progress) - 2)
        if room < 12:
            return Text(progress, style="bold")
        return Text(names[:room].ljust(room + 2)) + Text(progress, style="bold")

    def _now(self, width: int) -> Text:
        name, done, total, note = self._phase
        if not name:
            return Text("")
        text = f"{name} {seconds_text(time.monotonic() - self._phase_began)}"
        if total > 0:
            text = f"{name} {bar(done / total, min(24, width // 4), self._glyphs)} {done}/{total}"
        note = encodable(printable(note), self._stream)
        return self._label("now") + Text(f"{self._glyphs.now} {text}  {note}".rstrip())

    def _cells(self, width: int) -> list[Text]:
        """Numbers with their curves, in as many columns as fit."""
        columns = 3 if width >= 108 else 2 if width >= 72 else 1
        cell_width = width // columns
        cells = [cell for cell in self._all_cells(cell_width - 2) if cell.plain]
        rows = []
        for begin in range(0, len(cells), columns):
            row = Text("")
            for cell in cells[begin : begin + columns]:
                cell.truncate(cell_width, overflow="crop", pad=True)
                row.append_text(cell)
            rows.append(row)
        return rows

    def _all_cells(self, width: int) -> list[Text]:
        history = self._history
        evaluations, best = history.evaluations(), history.best_evaluation()
        best_text = f"best {number_text(best[0])} at {best[1]}" if best else ""
        failed = history.values(FAILED)
        failed_text = f"failed {failed[-1]:.0%}" if failed and failed[-1] > 0 else ""
        truncated = history.values("response/truncated_fraction")
        truncated_text = f"cut {truncated[-1]:.0%}" if truncated else ""
        return [
            self._cell("reward", history.values("reward/mean"), width, failed_text),
            self._cell("eval", evaluations, width, best_text),
            self._cell("length", history.values("response/length_mean"), width, truncated_text),
            self._cell("KL", history.values("actor/kl_ref") or history.values("actor/kl_old"), width),
            self._cell("entropy", history.values("actor/entropy"), width),
            self._cell("zero-std", history.values("group/zero_std_fraction"), width),
        ]

    def _cell(self, name: str, values: Sequence[float], width: int, note: str = "") -> Text:
        if not values:
            return Text("")
        value = f"{values[-1]:.3g}".rjust(7)
        room = width - _LABEL_WIDTH - len(value) - 1 - (len(note) + 1 if note else 0)
        curve = sparkline(values, min(20, room), self._glyphs.levels)
        cell = self._label(name) + Text(value, style="bold") + Text(f" {curve}", style="green")
        return cell + Text(f" {note}") if note else cell

    def _phases(self, width: int) -> Text:
        """Where the time of the last steps went."""
        recent = [row for row in list(self._history.rows)[-20:] if "time/step" in row]
        names = dict.fromkeys(
            name for row in recent for name in row if name.startswith("time/") and name != "time/step"
        )
        seconds = {name.removeprefix("time/"): sum(row.get(name, 0.0) for row in recent) for name in names}
        total = sum(seconds.values())
        if total <= 0:
            return Text("")
        room = width - _LABEL_WIDTH - sum(len(name) + 7 for name in seconds)
        row = self._label("phases")
        for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
            share = value / total
            length = max(0, min(room, 60))
            blocks = self._glyphs.full * round(share * length)
            row.append(f"{name} ").append(blocks, style="blue").append(f"{' ' if blocks else ''}{share:.0%}  ")
        return row

    def _memory(self, width: int) -> Text:
        if not self._history.rows or self._history.info is None:
            return Text("")
        peaks = {name: value for name, value in self._history.rows[-1].items() if name.startswith("memory/")}
        if not peaks:
            return Text("")
        name, peak = max(peaks.items(), key=lambda item: item[1])
        phase = name.removeprefix("memory/").removesuffix("_peak_bytes")
        row, capacity = self._label("memory"), self._history.info.capacity_bytes
        if capacity:
            row.append(bar(peak / capacity, min(24, width // 4), self._glyphs), style="magenta").append(" ")
        row.append(bytes_text(peak))
        if capacity:
            row.append(f" of {bytes_text(capacity)}")
        return row.append(f"  peak in {phase}")

    def _label(self, text: str) -> Text:
        return Text(text.ljust(_LABEL_WIDTH), style="cyan")
