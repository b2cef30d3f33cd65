"""A plan's pictures show its numbers, in proportion, and nothing that a name could smuggle in."""

import struct
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ullage.base.errors import ConfigError, WriteError
from ullage.base.units import bytes_text
from ullage.config.load import load_mapping
from ullage.planner.bars import COLOURS
from ullage.planner.components import GIB, Term
from ullage.planner.hardware import parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.parts import PARTS
from ullage.planner.phases import Phase
from ullage.planner.picture import draw_html, draw_png
from ullage.planner.plan import plan


class Page(HTMLParser):
    """Every element with its attributes, and the text inside it."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self.stack = [], [], []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.stack[-1] if self.stack else "", data))

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def made(**changes):
    """A plan of two phases with round numbers on a device of 100 GiB."""
    config = load_mapping({"algorithm.name": "grpo"}).config
    whole = plan(find_shape("Qwen2.5-7B"), config, parse_machine("100GiB"))
    phases = (
        Phase("rollout", (Term("weights", 26 * GIB, "", {}), Term("kv_cache", 13 * GIB, "", {}))),
        Phase(
            "update",
            (Term("head", 13 * GIB, "", {}), Term("weights", 26 * GIB, "", {}), Term("weights", 26 * GIB, "", {})),
        ),
    )
    chosen = {"memory.recompute": {"value": 0.5, "why": "half of the layers, the rest fits"}}
    return replace(whole, **{"phases": phases, "chosen": chosen, **changes})


def test_bars_are_as_long_as_their_bytes():
    """The axis is 1.04 x 100 GiB = 1000 units: 26 GiB are 250, 13 are 125, and the device ends at 961.538."""
    page = Page(draw_html(made()))
    bars = [(each["x"], each["width"], each["fill"]) for each in page.of("rect")]
    weights, cache, head = COLOURS["weights"], COLOURS["kv_cache"], COLOURS["head"]
    assert bars == [
        ("0.000", "250.000", weights),
        ("250.000", "125.000", cache),
        ("0.000", "500.000", weights),
        ("500.000", "125.000", head),
    ]
    assert [line["x1"] for line in page.of("line")] == ["961.538"] * 2
    assert all(line["x1"] == line["x2"] for line in page.of("line"))


def test_where_nothing_fits_the_axis_ends_behind_the_largest_phase():
    small = replace(made().machine, gpu=replace(made().machine.gpu, memory_bytes=13 * GIB))
    page = Page(draw_html(made(machine=small)))
    assert [each["width"] for each in page.of("rect")][2] == f"{1000 * 52 / (1.04 * 65):.3f}"
    assert [line["x1"] for line in page.of("line")] == [f"{1000 * 13 / (1.04 * 65):.3f}"] * 2
    assert "bad" in {kind for each in page.of("p") for kind in each.get("class", "").split()}


def test_every_number_is_there_as_text():
    page = Page(draw_html(made()))
    cells = [text for tag, text in page.texts if tag == "td"]
    assert cells[:5] == ["rollout", "39.0 GiB", "26.0 GiB", "-", "13.0 GiB"]
    assert cells[5:10] == ["update (binds)", "65.0 GiB", "52.0 GiB", "13.0 GiB", "-"]
    assert "half of the layers, the rest fits" in cells
    assert ("code", "memory.recompute=0.5") in page.texts
    assert ("desc", "weights 52.0 GiB, head 13.0 GiB") in page.texts
    assert ("title", "update: 65.0 GiB") in page.texts
    assert {text for tag, text in page.texts if tag == "li"} >= {"weights", "kv cache", *made().assumptions}
    for lever in made().levers:
        assert ("code", lever.change) in page.texts


def test_every_part_says_what_it_is():
    rows = Page(draw_html(plan(find_shape("Qwen2.5-7B"), load_mapping({}).config, parse_machine("h200"))))
    cells = [text for tag, text in rows.texts if tag == "td"]
    assert cells[cells.index("graphs") + 1].startswith("pool of the captured steps of decoding (CUDA graphs): reserved")
    assert COLOURS["graphs"] in {each["fill"] for each in rows.of("rect")}
    assert list(COLOURS) == list(PARTS)


def shared_out():
    """A run that does not fit one GPU, but would all eight."""
    return plan(find_shape("Llama-3.1-70B"), load_mapping({"algorithm.name": "grpo"}).config, parse_machine("h100 x8"))


def test_weights_shared_out_have_a_chart_of_their_own():
    whole = shared_out()
    page = Page(draw_html(whole))
    title = f"Shared out over 8 GPUs ({whole.spread.sharding.text}) it would fit, which Ullage cannot do yet"
    assert ("h2", title) in page.texts
    after = page.texts[page.texts.index(("h2", title)) :]
    for phase in whole.spread.phases:
        assert ("title", f"{phase.name}: {bytes_text(phase.total_bytes)}") in after
    ids = [each["id"] for each in page.of("title") if "id" in each]
    assert len(ids) == len(set(ids)) == len(whole.phases) + len(whole.spread.phases)
    assert sum(each["fill"] == COLOURS["gather"] for each in page.of("rect")) > 0
    told = {text for tag, text in page.texts if tag == "li"}
    assert any(text.startswith("by formula only: Ullage does not shard yet (") for text in told)
    fitting = plan(find_shape("Qwen2.5-7B"), load_mapping({}).config, parse_machine("h100 x8"))
    assert not any("hared out" in text for _, text in Page(draw_html(fitting)).texts)


def test_a_png_has_the_chart_of_weights_shared_out_below(tmp_path):
    pytest.importorskip("matplotlib")
    whole, path = shared_out(), tmp_path / "plan.png"
    draw_png(whole, path)
    phases = len(whole.phases) + len(whole.spread.phases)
    assert struct.unpack(">II", path.read_bytes()[16:24]) == (1500, round(150 * (1 + 2 * 1.2 + 0.45 * phases)))


def test_without_a_machine_there_is_no_line():
    page = Page(draw_html(made(machine=None)))
    assert page.of("line") == []
    assert not any("usable" in text for _, text in page.texts)


def test_a_hostile_name_stays_text():
    hostile = "<script>alert('&')</script>\"\x1b[31m"
    text = draw_html(made(shape=replace(made().shape, name=hostile), assumptions=("<b onclick=x>",)))
    page = Page(text)
    assert page.of("script") == page.of("b") == []
    assert ("h1", "<script>alert('&')</script>\" on 100GiB") in page.texts
    assert ("li", "<b onclick=x>") in page.texts
    assert "\x1b" not in text


def test_the_page_loads_nothing():
    page = Page(draw_html(made()))
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not any({"src", "href", "onload"} & set(attributes) for _, attributes in page.elements)


def test_a_png_has_the_size_of_its_phases_and_arrives_whole(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    draw_png(made(shape=replace(made().shape, name="a $x_1 model")), path)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1500, round(150 * (2.2 + 0.45 * 2)))
    assert list(tmp_path.iterdir()) == [path]


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    taken = tmp_path / "plan.png"
    taken.mkdir()
    with pytest.raises(WriteError, match="cannot write"):
        draw_png(made(), taken)
    assert list(tmp_path.iterdir()) == [taken]
    with pytest.raises(WriteError, match="No such file"):
        draw_png(made(), tmp_path / "missing" / "plan.png")


def test_a_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="needs matplotlib") as caught:
        draw_png(made(), tmp_path / "plan.png")
    assert caught.value.remedy == "pip install 'ullage[plot]'"
