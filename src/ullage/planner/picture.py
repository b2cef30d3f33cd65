"""A plan as a picture: a web page that stands alone, and a PNG (which needs matplotlib, the extra `plot`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ullage.base.errors import ConfigError, WriteError
from ullage.base.units import bytes_text, seconds_text
from ullage.planner.bars import COLOURS, GIB, LIGHT_INK, Bars, colour, parts, words
from ullage.planner.parts import parts_of
from ullage.planner.phases import Phase
from ullage.planner.plan import Plan
from ullage.planner.spread import NOT_YET, Spread
from ullage.telemetry.view import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, TALL = 1000, 24
"""Units of a bar's drawing: all of the axis, and one bar."""
LABELLED = 0.1
"""A part of a bar that is at least so much of the axis has its name in it."""
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --quiet: #57606a; --paper: #fff; --line: #d8dee4; --good: #116329;
  --bad: #a40e26; --soft: #f6f8fa }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --quiet: #9aa4af; --paper: #0d1117; --line: #30363d;
  --good: #56d364; --bad: #ff7b72; --soft: #161b22 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 3rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.quiet, caption { color: var(--quiet) } .verdict { font-weight: 600; margin: .75rem 0 1.25rem }
.good { color: var(--good) } .bad { color: var(--bad) }
.row { display: grid; grid-template-columns: 8.5rem minmax(0, 1fr) 8.5rem; column-gap: .75rem; align-items: center;
  margin: .3rem 0 }
.row .name { text-align: right } .binding .name, .binding .total { font-weight: 700 }
.total { font-variant-numeric: tabular-nums; white-space: nowrap }
.bar { position: relative; height: 1.75rem } .bar svg { display: block; width: 100%; height: 100%; overflow: visible }
.bar rect { stroke: var(--paper); stroke-width: 1px; vector-effect: non-scaling-stroke }
.bar line { stroke: var(--ink); stroke-width: 2px; stroke-dasharray: 4 3; vector-effect: non-scaling-stroke }
.bar span { position: absolute; top: 0; line-height: 1.75rem; font-size: .75rem; text-align: center; overflow: hidden;
  white-space: nowrap; pointer-events: none; color: #111 } .bar span.light { color: #fff }
.axis { position: relative; height: 1.4rem; font-size: .8rem; color: var(--quiet) }
.axis span { position: absolute; transform: translateX(-50%); white-space: nowrap }
.axis .before { transform: translateX(-100%) } .axis .after { transform: none } .capacity { color: var(--ink) }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: .75rem 0; list-style: none;
  font-size: .85rem } .legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  border: 1px solid var(--line) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .875rem; overflow-wrap: normal }
caption { text-align: left; white-space: nowrap; padding-bottom: .25rem }
td:first-child { white-space: nowrap }
th, td { padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
code { background: var(--soft); padding: .1em .3em; border-radius: 3px; font-size: .9em }
@media (max-width: 40rem) { .row { grid-template-columns: 1fr auto } .row .name { text-align: left }
  .row .total { grid-column: 2; grid-row: 1 } .row .bar, .row .axis { grid-column: 1 / -1 }
  .row .bar { margin-top: .35rem } .bar span { display: none } }
"""


# --- a web page ---


def draw_html(made: Plan) -> str:
    """A whole page: bars by phase against what there is, and every number again as text. It loads nothing."""
    title = _title(made)
    state = {True: "good", False: "bad", None: "quiet"}[made.fits]
    mark = {True: "&#10003; ", False: "&#10007; ", None: ""}[made.fits]
    bars = Bars(made.phases, made.capacity_bytes)
    sections = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="quiet">{made.shape.parameters / 1e9:.2f} billion parameters</p>',
        f'<p class="verdict {state}">{mark}{_text(made.verdict)}</p>',
        *_chart(bars, "phase"),
        "<h2>Phases</h2>",
        *_phase_table(bars),
        *_meanings([*made.phases, *(made.spread.phases if made.spread else ())]),
        *_chosen(made),
        *_fixes(made),
        *_spread(made),
        *_levers(made),
        *_time(made),
        *_elsewhere(made),
        *_assumed(made),
    ]
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body><main>",
    ]
    return "\n".join([*lines, *sections, "</main></body></html>", ""])


def _chart(bars: Bars, prefix: str) -> Iterator[str]:
    """Args: prefix: of ids, which no other chart of the page has."""
    whole, there = bars.axis_bytes, bars.capacity
    yield '<section aria-label="Memory by phase">'
    if there:
        share = there / whole
        side = "before" if share > 0.5 else "after"
        text = f"{bytes_text(there)} usable"
        label = f'<span class="capacity {side}" style="left:{100 * share:.3f}%">{text}</span>'
        yield f'<div class="row"><div></div><div class="axis">{label}</div><div></div></div>'
    for phase in bars.phases:
        yield _bar(bars, phase, f"{prefix}-{phase.name}")
    labels = "".join(f'<span style="left:{100 * at / whole:.3f}%">{at / GIB:,g}</span>' for at in bars.ticks)
    yield f'<div class="row"><div></div><div class="axis">{labels}</div><div class="quiet">GiB</div></div>'
    yield '<ul class="legend">'
    yield from (f'<li><i style="background:{colour(name)}"></i>{_text(words(name))}</li>' for name in bars.names)
    yield "</ul></section>"


def _bar(bars: Bars, phase: Phase, named: str) -> str:
    """One phase: its parts from left to right, a dashed line where the device ends, and their names where they fit."""
    shapes, labels, left, whole = [], [], 0.0, bars.axis_bytes
    for name, count in parts(phase):
        wide = WIDE * count / whole
        told = f"<title>{_text(words(name))}: {bytes_text(count)}</title>"
        size = f'width="{wide:.3f}" height="{TALL}"'
        shapes.append(f'<rect x="{left:.3f}" y="0" {size} fill="{colour(name)}">{told}</rect>')
        if wide >= LABELLED * WIDE:
            place = f"left:{100 * left / WIDE:.3f}%;width:{100 * wide / WIDE:.3f}%"
            ink = ' class="light"' if name in LIGHT_INK else ""
            labels.append(f'<span{ink} style="{place}" aria-hidden="true">{_text(words(name))}</span>')
        left += wide
    if bars.capacity:
        at = f"{WIDE * bars.capacity / whole:.3f}"
        shapes.append(f'<line x1="{at}" x2="{at}" y1="-3" y2="{TALL + 3}"/>')
    listed = ", ".join(f"{words(name)} {bytes_text(count)}" for name, count in parts(phase))
    binds = phase is bars.binding
    drawing = (
        f'<svg viewBox="0 0 {WIDE} {TALL}" preserveAspectRatio="none" role="img" aria-labelledby="{_text(named)}">'
        f'<title id="{_text(named)}">{_text(phase.name)}: {bytes_text(phase.total_bytes)}</title>'
        f"<desc>{_text(listed)}</desc>"
        f"{''.join(shapes)}</svg>"
    )
    return (
        f'<div class="row{" binding" if binds else ""}"><div class="name">{_text(words(phase.name))}</div>'
        f'<div class="bar">{drawing}{"".join(labels)}</div>'
        f'<div class="total">{bytes_text(phase.total_bytes)}{" &#9664; binds" if binds else ""}</div></div>'
    )


def _phase_table(bars: Bars) -> Iterator[str]:
    names = bars.names
    head = ["phase", "together", *(words(name) for name in names)]
    rows = []
    for phase in bars.phases:
        held = phase.components
        cells = [bytes_text(held[name]) if name in held else "-" for name in names]
        title = f"{words(phase.name)} (binds)" if phase is bars.binding else words(phase.name)
        rows.append([title, bytes_text(phase.total_bytes), *cells])
    caption = "What is on the device at the peak of each phase; all of it counts against the device"
    yield from _table(caption, head, rows, numbers=len(head) - 1)


def _meanings(phases: Sequence[Phase]) -> Iterator[str]:
    yield "<h2>Parts</h2>"
    rows = [[words(name), text] for name, text in parts_of(phases).items()]
    yield from _table("What each part of a phase is", ["part", "what it is"], rows)


def _chosen(made: Plan) -> Iterator[str]:
    if made.chosen:
        yield "<h2>Chosen</h2>"
        rows = [[f"{key}={_value(each['value'])}", str(each["why"])] for key, each in made.chosen.items()]
        yield from _table("Keys that were left on auto", ["key", "why"], rows, code=True)


def _fixes(made: Plan) -> Iterator[str]:
    if made.fixes:
        yield "<h2>What would make it fit</h2>"
        rows = [[fix.change, fix.alters or "nothing", bytes_text(fix.peak_bytes)] for fix in made.fixes]
        yield from _table("The cheapest first", ["change", "alters", "peak"], rows, code=True, numbers=1)


def _spread(made: Plan) -> Iterator[str]:
    """The run with its weights shared out over the GPUs there are, as far as formulas know it."""
    spread = made.spread
    if spread is None:
        return
    bars = Bars(spread.phases, made.capacity_bytes)
    yield f"<h2>{_text(_shared_out(spread))}</h2>"
    told = f"a step {seconds_text(spread.step_seconds)}; host memory {bytes_text(spread.host_bytes)} for each GPU"
    yield f'<p class="quiet">{_text(told)}</p>'
    yield from (*_chart(bars, "shared"), *_phase_table(bars))
    if spread.chosen:
        rows = [[f"{key}={_value(value)}"] for key, value in spread.chosen.items()]
        yield from _table("Keys that were left on auto, as they would be then", ["key"], rows, code=True)
    yield from ("<ul>", *(f"<li>{_text(text)}</li>" for text in spread.assumptions), "</ul>")


def _levers(made: Plan) -> Iterator[str]:
    if made.levers:
        yield "<h2>Levers</h2>"
        rows = [[lever.change, bytes_text(lever.saves_bytes), f"{lever.slowdown:+.1%}"] for lever in made.levers]
        yield from _table(
            "What would lower the peak, the best first", ["key", "saves", "time"], rows, code=True, numbers=2
        )


def _time(made: Plan) -> Iterator[str]:
    if made.seconds:
        yield "<h2>Time</h2>"
        rows = [[words(name), f"{seconds:.1f} s"] for name, seconds in made.seconds.items()]
        rows.append(["together", seconds_text(sum(made.seconds.values()))])
        yield from _table("A step, as predicted, every response at its full length", ["phase", "time"], rows, numbers=1)


def _elsewhere(made: Plan) -> Iterator[str]:
    yield "<h2>Host and disk</h2>"
    rows = [[f"host: {words(name)}", bytes_text(count)] for name, count in made.host.items() if count]
    rows.append(["host, together", bytes_text(made.host_bytes)])
    rows += [[f"disk: {words(name)}", bytes_text(count)] for name, count in made.disk.items()]
    yield from _table("Of each GPU's process", ["what", "bytes"], rows, numbers=1)


def _assumed(made: Plan) -> Iterator[str]:
    if made.assumptions:
        yield "<h2>Assumed</h2><ul>"
        yield from (f"<li>{_text(text)}</li>" for text in made.assumptions)
        yield "</ul>"


def _table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0, code: bool = False
) -> Iterator[str]:
    """The last columns hold numbers; the first one code, where that is said."""
    first = len(head) - numbers

    def cells(row: Sequence[str], tag: str) -> str:
        texts = [_text(text) for text in row]
        if code and tag == "td":
            texts[0] = f"<code>{texts[0]}</code>"
        kinds = [' class="number"' if at >= first else "" for at in range(len(row))]
        return "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    yield f'<div class="scroll"><table><caption>{_text(caption)}</caption>'
    yield f"<thead><tr>{cells(head, 'th')}</tr></thead><tbody>"
    yield from (f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    yield "</tbody></table></div>"


# --- a PNG ---


def draw_png(made: Plan, path: Path) -> None:
    """The bars alone, whole or not at all."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing a plan needs matplotlib", "pip install 'ullage[plot]'") from None
    charts = [(Bars(made.phases, made.capacity_bytes), _title(made), made.verdict)]
    if made.spread:
        charts.append((Bars(made.spread.phases, made.capacity_bytes), "", _shared_out(made.spread)))
    heights = [1.2 + 0.45 * len(bars.phases) for bars, _, _ in charts]
    figure = Figure(figsize=(10, 1 + sum(heights)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    found = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)
    for axes, (bars, title, verdict) in zip(found[:, 0], charts, strict=True):
        _draw_bars(axes, bars)
        axes.set_title(printable(title), loc="left", fontsize=13, fontweight="bold", pad=40, parse_math=False)
        axes.annotate(
            printable(verdict), (0, 1), xycoords="axes fraction", xytext=(0, 24), textcoords="offset points",
            fontsize=10, parse_math=False,
        )  # fmt: skip
    handles: dict[str, Any] = {}
    for axes in found[:, 0]:
        drawn_bars, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn_bars, strict=True))
    named = [name for name in map(words, COLOURS) if name in handles]
    figure.legend(
        [handles[name] for name in named], named, loc="outside lower center", ncols=7, frameon=False, fontsize=9
    )
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    _write(path, drawn.getvalue())


def _draw_bars(axes: Axes, bars: Bars) -> None:
    whole = bars.axis_bytes / GIB
    for name in bars.names:
        lefts, widths = _stacked(bars, name)
        axes.barh(
            range(len(bars.phases)), widths, left=lefts, height=0.7, color=colour(name), edgecolor="white",
            linewidth=0.6, label=words(name),
        )  # fmt: skip
    for row, phase in enumerate(bars.phases):
        binds = phase is bars.binding
        text = f"{bytes_text(phase.total_bytes)}{'  binds' if binds else ''}"
        weight = "bold" if binds else "normal"
        axes.text(1.01 * whole, row, text, va="center", fontsize=9, fontweight=weight)
    there = bars.capacity
    if there:
        axes.axvline(there / GIB, color="#1b1f24", linestyle=(0, (4, 3)), linewidth=1.4)
        where = ("right", -4) if there > 0.5 * whole * GIB else ("left", 4)
        axes.annotate(
            f"{bytes_text(there)} usable", (there / GIB, 1), xycoords=("data", "axes fraction"), xytext=(where[1], 4),
            textcoords="offset points", ha=where[0], fontsize=9,
        )  # fmt: skip
    axes.set_yticks(range(len(bars.phases)), [words(phase.name) for phase in bars.phases])
    axes.invert_yaxis()
    axes.set_xlim(0, whole)
    axes.set_xticks([at / GIB for at in bars.ticks])
    axes.set_xlabel("GiB", color="#57606a")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors="#57606a", length=3)
    axes.grid(axis="x", color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)


def _stacked(bars: Bars, name: str) -> tuple[list[float], list[float]]:
    """Where a component's bars begin and how long they are, phase by phase."""
    lefts, widths = [], []
    for phase in bars.phases:
        held = dict(parts(phase))
        before = list(held)[: list(held).index(name)] if name in held else []
        lefts.append(sum(held[each] for each in before) / GIB)
        widths.append(held.get(name, 0) / GIB)
    return lefts, widths


def write_html(made: Plan, path: Path) -> None:
    _write(path, draw_html(made).encode())


def _write(path: Path, content: bytes) -> None:
    """Beside the file, then in its place: never a part of a picture."""
    if path.is_dir():
        raise WriteError(f"cannot write {path}: it is a folder", "name a file")
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise WriteError(f"cannot write {path}: {error.strerror}", "make the folder and make it writable") from None


# --- what both show ---


def _title(made: Plan) -> str:
    return f"{made.shape.name} on {made.machine.text}" if made.machine else made.shape.name


def _shared_out(spread: Spread) -> str:
    return f"{spread.text[0].upper()}{spread.text[1:]} it would fit, {NOT_YET}"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _text(text: str) -> str:
    return escape(printable(text))
