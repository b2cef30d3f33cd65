"""The view for logs, pipes and CI: one line per step, `key=value`, no colour and no cursor movement."""

from collections.abc import Mapping
from typing import TextIO

from ullage.base.units import bytes_text, seconds_text
from ullage.telemetry.run_directory import RunInfo
from ullage.telemetry.view import FAILED, History, encodable, number_text, printable

_SHOWN = (
    "reward/mean",
    "response/length_mean",
    "response/truncated_fraction",
    "group/zero_std_fraction",
    "actor/loss",
    "actor/kl_ref",
    "actor/entropy",
    "actor/clip_fraction",
    "actor/grad_norm",
    "rollout/logprob_gap_mean",
)


class PlainView:
    """Lines on a stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._history = History()

    def start(self, info: RunInfo) -> None:
        self._history.info = info
        self._line(f"run={info.name} algorithm={info.algorithm} model={info.model} steps={info.total_steps}")

    def phase(self, name: str, done: int, total: int, note: str) -> None:
        """Nothing: a log wants results, not motion."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._history.add(step, metrics)
        total = f"/{self._history.info.total_steps}" if self._history.info else ""
        evaluations = [name for name in metrics if name.startswith("eval/")]
        fields = [f"{name}={number_text(metrics[name])}" for name in (*evaluations, *_SHOWN) if name in metrics]
        if metrics.get(FAILED, 0.0) > 0:
            fields.append(f"{FAILED}={number_text(metrics[FAILED])}")
        fields += [f"{name}={metrics[name]:.1f}s" for name in metrics if name.startswith("time/")]
        peaks = [metrics[name] for name in metrics if name.startswith("memory/")]
        if peaks:
            fields.append(f"memory={bytes_text(max(peaks)).replace(' ', '')}")
        left = self._history.seconds_left()
        if left is not None:
            fields.append(f"eta={seconds_text(left)}")
        self._line(" ".join((f"step={step}{total}", *fields)))

    def event(self, text: str) -> None:
        self._line(text)

    def stop(self) -> None:
        self._stream.flush()

    def _line(self, text: str) -> None:
        self._stream.write(encodable(printable(text).replace("\n", " "), self._stream) + "\n")
        self._stream.flush()
