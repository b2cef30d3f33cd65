"""`ullage doctor`: what it says about this installation, and that it notices a model whose numbers are wrong."""

import json
import tempfile

import pytest
import torch

from make_tiny_model import make_tokenizer
from ullage.cli.main import main
from ullage.model.attention import PackedLayout
from ullage.model.head import Head
from ullage.run import installation, model_checks

INVARIANTS = [
    "rollout = trainer",
    "packed = its own forward",
    "packed = one by one",
    "shared prefix = not shared",
    "head in chunks = whole",
    "recomputed = kept",
]


def checks(capsys):
    """The checks that were printed as JSON, by name."""
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def test_this_installation_is_well(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    found = checks(capsys)
    assert list(found)[:9] == [
        "python", "torch", "transformers", "device", "cores", "memory", "disk", "runs", "hub",
    ]  # fmt: skip
    assert found["torch"]["detail"] == torch.__version__
    assert found["runs"]["detail"] == f"{tmp_path / 'runs'} can be written"
    assert found["hub"]["detail"] == "HF_HUB_OFFLINE is set: models and data must be local"
    assert {check["status"] for check in found.values()} <= {"ok", "warn"}
    assert list(tmp_path.iterdir()) == []


def test_a_line_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(installation, "EXTRAS", {"no-such-package": ("math", "the reward `math`")})
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(index for index, line in enumerate(lines) if "no-such-package" in line)
    assert lines[at] == "warn  no-such-package             not installed; needed for the reward `math`"
    assert lines[at + 1] == " " * 34 + "-> pip install 'ullage[math]'"


def test_an_old_or_missing_package_fails():
    old = installation.check_package("psutil", (999, 0))
    assert (old.status, old.remedy) == ("fail", "pip install 'psutil>=999.0'")
    assert installation.check_package("no-such-package", (1, 0)).status == "fail"
    assert installation.version_of("2.13.0+cpu") == (2, 13)
    assert installation.version_of("5.3") < (5, 4)


def test_a_folder_that_cannot_be_written_fails(monkeypatch, capsys):
    def refuse(dir):  # noqa: A002 -- the name tempfile has
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert main(["doctor", "--json"]) == 78
    check = checks(capsys)["runs"]
    assert check["status"] == "fail"
    assert check["detail"].endswith("cannot be written: Permission denied")


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_a_sound_model_keeps_every_promise(tiny_architecture, architecture, capsys):
    assert main(["doctor", str(tiny_architecture(architecture)), "--json"]) == 0
    found = checks(capsys)
    assert [name for name in found if name in INVARIANTS] == INVARIANTS
    for name in ("loads", "stop ids", "chat template", *INVARIANTS):
        assert found[name]["status"] == "ok", found[name]
    assert found["stop ids"]["detail"] == "2 '<eos>'"
    assert "(bound 5e-06), max " in found["rollout = trainer"]["detail"]
    assert "gradient" in found["recomputed = kept"]["detail"]


def test_a_leak_between_samples_is_noticed(tiny_model, monkeypatch, capsys):
    """Every sibling sees all of the padded row: only the shared pass is wrong."""
    honest = PackedLayout._sibling_tables

    def leaky(self, index, window):
        gather, mask, valid = honest(self, index, window)
        return gather, torch.ones_like(mask), valid

    monkeypatch.setattr(PackedLayout, "_sibling_tables", leaky)
    assert main(["doctor", str(tiny_model), "--json"]) == 70
    failed = [name for name, check in checks(capsys).items() if check["status"] == "fail"]
    assert failed == ["shared prefix = not shared"]


def test_a_head_that_is_not_the_models_is_noticed(tiny_model, monkeypatch, capsys):
    honest = Head._capped
    monkeypatch.setattr(Head, "_capped", lambda self, hidden: honest(self, hidden) * 1.01)
    assert main(["doctor", str(tiny_model)]) == 70
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fail")]
    assert [line.split("  ")[1] for line in failed] == ["packed = its own forward"]


def test_a_model_that_does_not_load_fails(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "nothing"), "--json"]) == 66
    check = checks(capsys)["loads"]
    assert check["status"] == "fail"
    assert "nothing" in check["detail"]


def test_a_run_is_a_model_too(finished, capsys):
    assert main(["doctor", str(finished), "--json"]) == 0
    assert checks(capsys)["rollout = trainer"]["status"] == "ok"


@pytest.mark.parametrize(
    ("template", "status", "words"),
    [
        ("", "warn", "none"),
        ("{{ raise_exception('no') }}", "fail", "does not render"),
        ("{% for m in messages %}{{ m.content if loop.last else '' }}{% endfor %}", "warn", "changes earlier turns"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ok", "keeps earlier turns"),
    ],
)
def test_chat_templates(template, status, words):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    check = model_checks.check_template(tokenizer)
    assert (check.status, words in check.detail) == (status, True)


def test_what_a_template_writes_after_a_reply():
    tokenizer = make_tokenizer()
    assert model_checks.turn_ending(tokenizer) == "<eos>"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    assert model_checks.turn_ending(tokenizer) == "\n"
