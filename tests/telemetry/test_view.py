"""Which view a terminal gets, what text reaches it, and what the views say."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.telemetry.live import Glyphs, LiveView, bar, sparkline
from ullage.telemetry.plain import PlainView
from ullage.telemetry.run_directory import RunInfo
from ullage.telemetry.view import History, encodable, is_interactive, make_view, number_text, printable

INFO = RunInfo(
    name="brave-otter", algorithm="grpo", model="SmolLM2", total_steps=10, created_at=0.0, capacity_bytes=8 << 30
)
STEP = {
    "reward/mean": 0.5,
    "response/length_mean": 231.0,
    "response/truncated_fraction": 0.04,
    "group/zero_std_fraction": 0.22,
    "actor/kl_ref": 0.021,
    "actor/entropy": 0.61,
    "time/step": 12.0,
    "time/rollout": 9.0,
    "time/update": 3.0,
    "memory/rollout_peak_bytes": 1.0 * (1 << 30),
    "memory/update_peak_bytes": 2.0 * (1 << 30),
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [bold]text[/bold]\n\ttab", "plain [bold]text[/bold]\n\ttab"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Hhome", "home"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;aGk=\x07x", "x"),
        ("\x1b]52;never ended", ""),
        ("\x9b31mc1\x9d0;t\x9c!", "c1!"),
        ("\x1bPq#0\x1b\\dcs", "dcs"),
        ("\x1bcreset \x1b(0set \x1b", "reset set "),
        ("a\rb\r\nc\x08\x7f\x00\x07", "a\nb\nc"),
        ("abc\u202edcba\u2066x\u2069\u200f\u200b\ufeff", "abcdcbax"),
        ("lone \ud800 tag \U000e0041 日本 é 🙂", "lone  tag  日本 é 🙂"),
    ],
)
def test_printable_takes_out_what_a_terminal_would_obey(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_text_is_escaped_for_a_narrow_encoding():
    latin, ascii_only = io.TextIOWrapper(io.BytesIO(), "latin-1"), io.TextIOWrapper(io.BytesIO(), "ascii")
    assert encodable("é▁", latin) == "é\\u2581"
    assert encodable("é", ascii_only) == "\\xe9"


@pytest.mark.parametrize(
    ("environment", "tty", "interactive"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "xterm", "CI": "true"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, True),
    ],
)
def test_who_gets_the_live_view(environment, tty, interactive):
    stream = Terminal() if tty else io.StringIO()
    assert is_interactive(stream, environment) is interactive
    assert isinstance(make_view(stream, environment), LiveView if interactive else PlainView)


def test_a_closed_stream_is_not_interactive():
    stream = io.StringIO()
    stream.close()
    assert is_interactive(stream, {"TERM": "xterm"}) is False


def test_plain_lines_are_structured():
    stream = io.StringIO()
    view = PlainView(stream)
    view.start(INFO)
    view.phase("rollout", 1, 2, "note")
    view.step(0, {"eval/sums/mean@4": 0.19})
    view.event("\x1b[31mtwo\nlines\r")
    view.step(1, STEP)
    view.stop()
    assert stream.getvalue() == (
        "run=brave-otter algorithm=grpo model=SmolLM2 steps=10\n"
        "step=0/10 eval/sums/mean@4=0.19\n"
        "two lines \n"
        "step=1/10 reward/mean=0.5 response/length_mean=231 response/truncated_fraction=0.04 "
        "group/zero_std_fraction=0.22 actor/kl_ref=0.021 actor/entropy=0.61 "
        "time/step=12.0s time/rollout=9.0s time/update=3.0s memory=2.0GiB eta=1:48\n"
    )


def test_history_knows_the_best_evaluation_and_the_time_left():
    history = History()
    history.info = INFO
    assert history.seconds_left() is None
    history.add(0, {"eval/a/mean": 0.2})
    history.add(1, {"time/step": 10.0, "eval/a/mean": 0.7})
    history.add(2, {"time/step": 20.0, "eval/a/mean": 0.7, "x": float("nan")})
    assert history.best_evaluation() == (0.7, 1)
    assert (history.seconds_per_step(), history.seconds_left()) == (15.0, 120.0)
    assert history.values("x") == []


def test_history_knows_that_a_loss_should_fall():
    history = History()
    for step, loss in enumerate((2.0, 0.5, 0.75)):
        history.add(step, {"eval/a/loss": loss})
    assert history.best_evaluation() == (0.5, 1)
    assert history.evaluations() == [2.0, 0.5, 0.75]


def test_failed_rewards_are_shown_where_there_are_any():
    stream = io.StringIO()
    plain, live = PlainView(stream), LiveView(io.StringIO(), color=False)
    shown = []
    for step, failed in ((1, 0.0), (2, 0.125)):
        metrics = {"reward/mean": 0.5, "reward/failed_fraction": failed}
        plain.step(step, metrics)
        live.step(step, metrics)
        shown.append(str(live.render(80).renderables[-1]).rstrip())
    assert stream.getvalue().splitlines() == [
        "step=1 reward/mean=0.5", "step=2 reward/mean=0.5 reward/failed_fraction=0.125"
    ]  # fmt: skip
    assert "failed" not in shown[0]
    assert shown[1].endswith(" failed 12%")


def test_sparkline_compresses_the_whole_history():
    levels = "01234567"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, levels) == "01234567"
    assert sparkline([0, 0, 7, 7], 2, levels) == "07"
    assert sparkline([5, 5], 9, levels) == "00"
    assert sparkline([], 9, levels) == sparkline([1.0], 0, levels) == ""


def test_bar_is_as_wide_as_asked():
    glyphs = Glyphs(full="#", empty=".")
    assert [bar(share, 4, glyphs) for share in (-1, 0, 0.5, 1, 9)] == ["....", "....", "##..", "####", "####"]


def test_numbers_are_short():
    assert [number_text(x) for x in (0, 0.41254, 231.5, 3e-6, 15320.4, float("nan"))] == [
        "0", "0.4125", "231.5", "3e-06", "15320", "nan",
    ]  # fmt: skip


def _picture(width, stream=None):
    view = LiveView(stream or Terminal(), color=False)
    view._history.info = INFO
    view.phase("rollout", 16, 64, "3.1k tok/s")
    view.step(1, {**STEP, "eval/sums/mean@4": 0.38})
    view.step(2, {**STEP, "reward/mean": 0.75})
    return [row.plain.rstrip() for row in view.render(width).renderables]


def test_the_live_picture_at_120_columns():
    assert _picture(120) == [
        "grpo · SmolLM2 · brave-otter" + " " * 50 + "step 2/10  20%  12.0 s/step  ETA 1:36".rjust(42),
        "now      ▶ rollout ██████░░░░░░░░░░░░░░░░░░ 16/64  3.1k tok/s",
        "reward      0.75 ▁█                     eval        0.38 ▁ best 0.38 at 1       length       231 ▁▁ cut 4%",
        "KL         0.021 ▁▁                     entropy     0.61 ▁▁                     zero-std    0.22 ▁▁",
        "phases   rollout █████████████████████████████████████████████ 75%  update ███████████████ 25%",
        "memory   ██████░░░░░░░░░░░░░░░░░░ 2.0 GiB of 8.0 GiB  peak in update",
    ]


@pytest.mark.parametrize("width", [1, 20, 40, 72, 80, 107, 108, 200])
def test_the_picture_never_exceeds_the_terminal(width):
    rows = _picture(width)
    assert len(rows) <= 12
    assert max(map(len, rows)) <= width


def test_the_picture_at_40_columns_keeps_the_numbers():
    rows = _picture(40)
    assert rows[0] == "step 2/10  20%  12.0 s/step  ETA 1:36"
    cells = [" ".join(row.split()[:2]) for row in rows[2:8]]
    assert cells == ["reward 0.75", "eval 0.38", "length 231", "KL 0.021", "entropy 0.61", "zero-std 0.22"]


def test_the_picture_is_ascii_where_it_must_be():
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    assert "".join(_picture(120, stream)).isascii()


LIVE = """
import sys
sys.path.insert(0, {tests!r})
from test_view import INFO, STEP
from ullage.telemetry.view import make_view
view = make_view()
view.start(INFO)
view.phase("rollout", 1, 4, "n\\u00e9")
view.step(1, STEP)
view.event("[red]model text[/red] \\u4f60 \\x1b]0;owned\\x07")
view.stop()
sys.stdout.write("data")
"""


@pytest.mark.parametrize(
    "extra", [{}, {"NO_COLOR": "1"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}]
)
def test_the_live_view_on_a_real_terminal(extra):
    """A child with a pseudo-terminal for stderr and a pipe for stdout."""
    leader, follower = os.openpty()
    try:
        environment = {key: value for key, value in os.environ.items() if key not in ("CI", "NO_COLOR")}
        environment |= {"TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2] / "src"), **extra}
        script = LIVE.format(tests=str(Path(__file__).parent))
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=follower, env=environment, check=True
        )
        output = os.read(leader, 100_000).decode()
    finally:
        os.close(leader)
        os.close(follower)
    assert done.stdout == b"data"
    assert "step 1/10" in output
    assert "[red]model text[/red]" in output
    assert "owned" not in output
    assert ("\x1b[36m" in output) is ("NO_COLOR" not in extra)
    assert output.isascii() is ("LC_ALL" in extra)
    assert "Traceback" not in output
