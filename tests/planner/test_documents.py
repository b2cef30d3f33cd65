"""Generated documents and templates are what the planner says today, link to what they rest on, and tell the truth."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from ullage.base.units import bytes_text
from ullage.cli import plan as plan_verb
from ullage.config.load import load_config
from ullage.config.settle import open_keys
from ullage.planner.documents import __main__ as entry
from ullage.planner.documents import documents, templates
from ullage.planner.documents.page import COMMAND, Page
from ullage.planner.documents.worked import GIB
from ullage.planner.hardware import parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.plan import plan

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")
TOLD = re.compile(r"^    ullage plan (.+)\n\n`(\w+)` binds with ([\d.,]+) GiB", re.MULTILINE)


@pytest.fixture(scope="module")
def made():
    return documents()


def test_documents_are_up_to_date(made):
    wrong = [name for name, text in made.items() if not _same(ROOT / name, text)]
    assert wrong == [], f"write them with: {COMMAND}"


def _same(path, text):
    return path.is_file() and path.read_text(encoding="utf-8") == text


def test_no_page_shows_how_it_was_made(made):
    assert [name for name, text in made.items() if name.endswith(".md") and ("{" in text or "None" in text)] == []


def test_every_link_leads_somewhere(made):
    pages = {name: text for name, text in made.items() if name.endswith(".md")}
    for name, text in pages.items():
        for target in LINK.findall(text):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            found = (ROOT / name).parent / path
            assert found.is_file(), f"{name}: {target}"
            if anchor:
                assert f'<a id="{anchor}"></a>' in found.read_text(encoding="utf-8"), f"{name}: {target}"


@pytest.mark.parametrize("page", ["sizes", "decide", "levers"])
def test_a_commands_own_answer_is_the_number_that_is_explained(made, page, capsys):
    """The first, the middle and the last explanation of the page, through the command line."""
    text = made[f"docs/planner/explained/{page}.md"]
    told = TOLD.findall(text)
    assert len(told) > 20
    for words, phase, number in (told[0], told[len(told) // 2], told[-1]):
        lines = _answer(words, capsys).splitlines()
        [bound] = [line for line in lines if line.endswith("<- binds")]
        assert bound.startswith(phase)
        assert float(bound.split()[-4].replace(",", "")) == float(number.replace(",", ""))


def _answer(words, capsys):
    parser = argparse.ArgumentParser()
    plan_verb.add_arguments(parser)
    arguments, overrides = parser.parse_known_args(shlex.split(words))
    assert plan_verb.run(arguments, overrides) == 0
    return capsys.readouterr().out


def test_all_thirty_corrections_are_there_with_their_numbers(made):
    rows = [line for line in made["docs/planner/often_quoted.md"].splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 30
    plain = [LINK.sub("]", row) for row in rows]
    told = {
        "8-bit Adam": "[2.03 GB]",
        "no term for logits": "5 to 30 GB",
        "70B with LoRA": "[141.1 GB]",
        "13B with LoRA": "[26.0 GB]",
        "7 more sequences": "[8.6 GB]",
        "maximum efficiency": "[13.5 GB]",
        "Lambda": "[$1.99] on 2026-08-03",
        "KV cache has the hidden size": "4 x for Llama-3.1-8B, 7 x for Qwen2.5-0.5B, 8 x for Llama-3.1-70B",
    }
    for quoted, number in told.items():
        [row] = [row for row in plain if quoted in row.split(" | ")[0]]
        assert number in row, row


def test_two_explanations_cannot_share_a_place():
    page = Page("a", "A")
    assert page.cell("1", "One, two", "x") == "[1](explained/a.md#one-two)"
    page.cell("1", "One, two", "x")
    with pytest.raises(ValueError, match="two explanations under one-two"):
        page.cell("2", "One two", "y")


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_a_template_fits_where_its_header_says_and_needs_what_it_says(name):
    path = ROOT / templates.FOLDER / f"{name}.yaml"
    loaded = load_config(path, [])
    assert loaded.notices == []
    assert loaded.config.later == {}
    machine = parse_machine(templates.TEMPLATES[name].machine)
    done = plan(find_shape(loaded.config.actor_rollout_ref.model.path), loaded.config, machine)
    assert done.fits
    assert open_keys(done.config) == []
    text = path.read_text(encoding="utf-8").partition("\n\n")[0].replace("\n# ", " ")
    assert f"{done.binding.name} binds with {done.peak_bytes / GIB:,.1f} GiB" in text
    assert f"host memory {done.host_bytes * machine.count / GIB:,.1f} GiB" in text
    for key in open_keys(loaded.config):
        assert f"{key}=" in text
    assert machine.gpus == loaded.config.trainer.n_gpus_per_node


def test_70b_in_bf16_does_not_fit_the_card_of_its_template():
    config = load_config(ROOT / templates.FOLDER / "70b.yaml", ["actor_rollout_ref.model.quantization=null"]).config
    done = plan(find_shape(config.actor_rollout_ref.model.path), config, parse_machine("H100"))
    assert done.fits is False
    assert done.peak_bytes > 131 * GIB, bytes_text(done.peak_bytes)


def test_the_entry_says_what_is_out_of_date_and_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(entry, "documents", lambda: {"docs/a.md": "new\n", "docs/b.md": "same\n"})
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "b.md").write_text("same\n")
    assert entry.main(["--check", "--root", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"out of date: docs/a.md\nwrite them with: {COMMAND}\n"
    assert not (tmp_path / "docs" / "a.md").exists()
    assert entry.main(["--write", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "wrote docs/a.md\n"
    assert (tmp_path / "docs" / "a.md").read_text() == "new\n"
    assert entry.main(["--check", "--root", str(tmp_path)]) == 0
