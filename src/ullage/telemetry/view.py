"""What a view of a running training is, which one this terminal gets, and text made safe for it."""

import os
import re
import sys
from collections import deque
from collections.abc import Mapping
from typing import Protocol, TextIO

from ullage.telemetry.metrics import best_evaluation, headline_evaluation
from ullage.telemetry.run_directory import RunInfo

# OSC, DCS, SOS, PM and APC strings up to their terminator (or the end), CSI sequences, other escapes: ECMA-48 §5.
_ESCAPES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f]).*?(?:\x07|\x1b\\|\x9c|\Z)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
    r"|\x1b[ -/]*[0-~]?",
    re.DOTALL,
)
# Other control characters, marks that reorder or hide text (Unicode TR9, TR36), lone surrogates, tag characters.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)
_RECENT_STEPS = 20
FAILED = "reward/failed_fraction"
"""Shown where it is above 0 only."""


class View(Protocol):
    """Something that shows a run, or sends it elsewhere. Nothing it does may stop the training."""

    def start(self, info: RunInfo) -> None:
        """The run begins, or goes on."""

    def phase(self, name: str, done: int, total: int, note: str) -> None:
        """Where the run is; `total` is 0 where the length is not known."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step, or an evaluation outside of one, has these results."""

    def event(self, text: str) -> None:
        """A line for the user."""

    def stop(self) -> None:
        """The run is over."""


class History:
    """The steps a view has seen, and what follows from them."""

    def __init__(self, length: int = 400) -> None:
        self.info: RunInfo | None = None
        self.step = 0
        self.rows: deque[Mapping[str, float]] = deque(maxlen=length)
        self._evaluations: list[tuple[int, Mapping[str, float]]] = []
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.rows.append(metrics)
        if "time/step" in metrics:
            self._step_seconds.append(metrics["time/step"])
        if headline_evaluation(metrics) is not None:
            self._evaluations.append((step, metrics))

    def values(self, name: str) -> list[float]:
        """Every value of a metric so far, oldest first; numbers that are not finite are left out."""
        return [row[name] for row in self.rows if abs(row.get(name, float("inf"))) < float("inf")]

    def evaluations(self) -> list[float]:
        values = (headline_evaluation(metrics) for _, metrics in self._evaluations)
        return [value for value in values if value is not None]

    def best_evaluation(self) -> tuple[float, int] | None:
        """The best score and the first step that reached it."""
        return best_evaluation(self._evaluations)

    def seconds_per_step(self) -> float | None:
        return sum(self._step_seconds) / len(self._step_seconds) if self._step_seconds else None

    def seconds_left(self) -> float | None:
        seconds = self.seconds_per_step()
        if seconds is None or self.info is None:
            return None
        return seconds * max(0, self.info.total_steps - self.step)


def printable(text: str) -> str:
    """Text from a model or a file, without anything that a terminal would obey instead of show.

    Escape sequences, control characters and marks that reorder or hide text go; tabs and line ends stay.
    """
    return _UNSEEN.sub("", _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))


def encodable(text: str, stream: TextIO) -> str:
    """The text with what the stream's encoding cannot write shown as an escape."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def number_text(value: float) -> str:
    """A metric in a few digits: `0.4125`, `231.5`, `3e-06`, `15320`."""
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def is_interactive(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether this is a terminal with a person in front of it."""
    if environment.get("CI") or environment.get("TERM", "") in ("", "dumb"):
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def make_view(stream: TextIO | None = None, environment: Mapping[str, str] | None = None) -> View:
    """The live view on a terminal, plain lines everywhere else."""
    stream = stream if stream is not None else sys.stderr
    environment = environment if environment is not None else os.environ
    if is_interactive(stream, environment):
        from ullage.telemetry.live import LiveView

        return LiveView(stream, color=not environment.get("NO_COLOR"))
    from ullage.telemetry.plain import PlainView

    return PlainView(stream)
