"""`ullage export`: bit for bit or converted, complete or not there, and nothing overwritten."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ullage.cli.main import main


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_weights_bit_for_bit(finished, tmp_path, capsys):
    out = tmp_path / "models" / "mine"
    assert main(["export", str(finished), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(out), "from": str(finished / "final"), "step": 4}
    assert names(out) == names(finished / "final")
    for path in out.iterdir():
        assert path.read_bytes() == (finished / "final" / path.name).read_bytes()
    assert names(out.parent) == ["mine"]


def test_what_is_exported_loads_and_files_are_like_others(finished, tmp_path):
    out = tmp_path / "mine"
    assert main(["export", str(finished), str(out), "--dtype", "bfloat16"]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    trained = load_file(finished / "final" / "model.safetensors")
    for name, value in load_file(out / "model.safetensors").items():
        assert torch.equal(value, trained[name].to(torch.bfloat16))
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("2+2=")["input_ids"] == AutoTokenizer.from_pretrained(finished / "final")("2+2=")["input_ids"]
    (tmp_path / "other").touch()
    assert {path.stat().st_mode for path in out.iterdir()} == {(tmp_path / "other").stat().st_mode}


def test_a_step_and_the_best(finished, tmp_path):
    folder = finished / "checkpoints"
    best, _ = json.loads((folder / "step_4" / "state.json").read_text())["best"]
    for words, step in ((["--step", "2"], 2), (["--best"], best)):
        out = tmp_path / words[0].strip("-")
        assert main(["export", str(finished), str(out), *words]) == 0
        expected = folder / f"step_{step}" / "model" / "model.safetensors"
        assert (out / "model.safetensors").read_bytes() == expected.read_bytes()


def test_a_run_that_was_stopped_gives_its_newest_whole_checkpoint(run_copy, tmp_path, capsys):
    (run_copy / "exit.json").unlink()
    (run_copy / "checkpoints" / "step_4" / "state.json").write_text("{}")
    assert main(["export", str(run_copy), str(tmp_path / "mine")]) == 0
    assert "damaged checkpoint" in capsys.readouterr().err
    expected = run_copy / "checkpoints" / "step_2" / "model" / "model.safetensors"
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == expected.read_bytes()


def test_nothing_is_overwritten(finished, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert main(["export", str(finished), str(tmp_path / "mine")]) == 74
    assert "already exists" in capsys.readouterr().err
    assert names(tmp_path / "mine") == []


@pytest.mark.parametrize(
    ("run", "out", "words", "code"),
    [
        ("RUN", "mine", ["--step", "3"], 66),
        ("nothing", "mine", [], 2),
        ("nothing", "mine", ["--best"], 2),
        ("RUN", "file/mine", [], 74),
        ("RUN", "mine", ["--best", "--step", "2"], 2),
    ],
)
def test_mistakes_have_their_codes_and_leave_nothing(run_copy, tmp_path, run, out, words, code):
    (tmp_path / "file").touch()
    assert main(["export", str(run_copy) if run == "RUN" else run, str(tmp_path / out), *words]) == code
    assert names(tmp_path) == ["file", "runs"]


def test_damaged_weights_leave_nothing(run_copy, tmp_path):
    path = run_copy / "final" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["export", str(run_copy), str(tmp_path / "mine"), "--dtype", "float32"]) == 66
    assert names(tmp_path) == ["runs"]


def test_a_run_without_weights_says_so(run_copy, tmp_path, capsys):
    (run_copy / "exit.json").unlink()
    (run_copy / "checkpoints").rename(tmp_path / "elsewhere")
    assert main(["export", str(run_copy), str(tmp_path / "mine")]) == 66
    assert "has no weights yet" in capsys.readouterr().err
