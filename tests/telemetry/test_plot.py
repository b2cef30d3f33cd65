"""The curve is a real PNG with the numbers of the run in it."""

import sys

import pytest

from ullage.base.errors import ConfigError, WriteError
from ullage.telemetry import plot

pytest.importorskip("matplotlib")
METRICS = [
    {"step": 0, "eval/sums/mean@4": 0.19},
    *({"step": step, "reward/mean": step / 20} for step in range(1, 20)),
    {"step": 20, "reward/mean": None, "eval/sums/mean@4": 0.95},
]


def test_running_mean_by_hand():
    assert plot.running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_the_picture_has_the_rewards_and_the_scores_before_and_after(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, path: (drawn.append(self), save(self, path)))
    path = tmp_path / "curve.png"
    plot.reward_curve(METRICS, path, "tiny", "held-out accuracy")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    [axes] = drawn[0].axes
    raw, mean, scores = axes.lines
    assert list(raw.get_ydata()) == [step / 20 for step in range(1, 20)]
    assert mean.get_ydata()[-1] == pytest.approx((15 + 16 + 17 + 18 + 19) / 5 / 20, abs=1e-12)
    assert (list(scores.get_xdata()), list(scores.get_ydata())) == ([0, 20], [0.19, 0.95])
    assert sorted(text.get_text() for text in axes.texts) == ["0.19", "0.95"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "training reward, mean of 5 steps",
        "held-out accuracy",
    ]


def test_a_run_without_steps_is_an_empty_picture(tmp_path):
    plot.reward_curve([], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_a_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="needs matplotlib") as caught:
        plot.reward_curve(METRICS, tmp_path / "curve.png")
    assert caught.value.remedy == "pip install 'ullage[plot]'"


def test_a_folder_that_is_not_there_is_a_write_error(tmp_path):
    with pytest.raises(WriteError, match="No such file"):
        plot.reward_curve(METRICS, tmp_path / "missing" / "curve.png")
