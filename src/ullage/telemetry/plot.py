"""The picture of a run: reward per step, and held-out score before and after, as a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.base.errors import ConfigError, WriteError
from ullage.telemetry.metrics import headline_evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REWARD, _SCORE, _QUIET = "#2a6fb0", "#d1682b", "#666666"
_SMOOTH_STEPS = 5


def reward_curve(
    metrics: Sequence[Mapping[str, Any]], path: Path, title: str = "", score: str = "held-out score"
) -> None:
    """Draw the metrics of a run (`reader.read_metrics`) to `path`; `score` names what the evaluation measures."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ConfigError("drawing a curve needs matplotlib", "pip install 'ullage[plot]'") from None
    rewards = [(row["step"], row["reward/mean"]) for row in metrics if row.get("reward/mean") is not None]
    scores = [(row["step"], value) for row in metrics if (value := headline_evaluation(row)) is not None]
    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")  # not pyplot: no global state, no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_rewards(axes, rewards)
    _draw_scores(axes, scores, score)
    axes.set_xlabel("training step", color=_QUIET)
    axes.set_title(title or "reward", loc="left", fontsize=12, fontweight="bold", pad=12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(colors=_QUIET, length=3)
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.06, y=0.12)
    if rewards or scores:
        axes.legend(frameon=False, loc="lower right", labelcolor=_QUIET)
    try:
        figure.savefig(path)
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror}", "make the folder writable") from None


def running_mean(values: Sequence[float], length: int) -> list[float]:
    """Mean of each value and up to `length - 1` before it."""
    windows = (values[max(0, end - length) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _draw_rewards(axes: "Axes", rewards: Sequence[tuple[int, float]]) -> None:
    if not rewards:
        return
    steps, values = zip(*rewards, strict=True)
    smooth = len(values) > 3 * _SMOOTH_STEPS  # a short run is its own best picture
    axes.plot(
        steps,
        values,
        color=_REWARD,
        linewidth=1.0 if smooth else 2.0,
        alpha=0.35 if smooth else 1.0,
        marker="o",
        markersize=2.5 if smooth else 4,
        label=None if smooth else "training reward",
    )
    if smooth:
        mean = running_mean(values, _SMOOTH_STEPS)
        axes.plot(steps, mean, color=_REWARD, linewidth=2.2, label=f"training reward, mean of {_SMOOTH_STEPS} steps")


def _draw_scores(axes: "Axes", scores: Sequence[tuple[int, float]], name: str) -> None:
    if not scores:
        return
    steps, values = zip(*scores, strict=True)
    style = (0, (4, 3)) if len(values) > 2 else "none"  # a line between before and after alone would be made up
    axes.plot(steps, values, color=_SCORE, linewidth=1.4, linestyle=style, marker="D", markersize=6, label=name)
    below, above = -16, 9  # the curve leaves the first point upwards
    for step, value, offset in {(steps[0], values[0], below), (steps[-1], values[-1], above)}:
        axes.annotate(
            f"{value:.2f}",
            (step, value),
            xytext=(0, offset),
            textcoords="offset points",
            ha="center",
            color=_SCORE,
            fontweight="bold",
        )
