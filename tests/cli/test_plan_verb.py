"""`ullage plan` as a user meets it: real processes, no torch, one line for what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.cli import main

SOURCE = Path(__file__).parents[2] / "src"


def test_it_loads_neither_torch_nor_transformers():
    script = (
        "import sys\nfrom ullage.cli.main import main\ncode = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\nsys.exit(code or bool(heavy))"
    )
    words = ["plan", "Qwen2.5-7B", "--gpu", "h200", "--json", "memory.recompute=none"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert json.loads(done.stdout)["binding_phase"] == "update"


def test_it_shows_phases_verdict_and_levers(capsys):
    assert main.main(["plan", "Qwen2.5-7B", "--gpu", "4090 x2"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Qwen2.5-7B: 7.62 B parameters on 2x RTX 4090\n")
    assert "does not fit: update needs" in told
    assert "\nrollout        ###" in told
    assert "  memory.optimizer_state=streamed" in told
    assert "assumed:" in told


def test_it_explains_every_number(capsys):
    assert main.main(["plan", "Qwen2.5-7B", "--explain"]) == 0
    told = capsys.readouterr().out
    assert "weights = 14.2 GiB = 2 B x P  [P=7,615,616,512]" in told
    assert "master = 28.4 GiB = 4 B x P" in told
    assert " of device memory; update binds\n" in told


def test_check_turns_the_verdict_into_a_code(capsys):
    assert main.main(["plan", "0.5B", "--gpu", "h200", "--check"]) == 0
    assert main.main(["plan", "70B", "--gpu", "24GiB", "--check"]) == 79
    assert main.main(["plan", "70B", "--gpu", "24GiB"]) == 0
    assert main.main(["plan", "70B", "--check"]) == 2
    capsys.readouterr()


def test_a_config_file_names_its_model(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref:\n  model:\n    path: Qwen/Qwen2.5-1.5B\n")
    assert main.main(["plan", str(path), "--json", "memory.gradients=host"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == 1_543_714_304
    assert told["host"]["gradients"] > 3e9
    path.write_text("algorithm:\n  name: grpo\n")
    assert main.main(["plan", str(path)]) == 2
    assert "actor_rollout_ref.model.path is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["qwen2.5-7bb"], 66, "nearest: Qwen2.5-7B"),
        (["8B", "--gpu", "h2000"], 2, "nearest: H200"),
        (["8B", "--gpu", "0GiB"], 2, "0GiB"),
        (["8B", "memory.recomput=full"], 78, "memory.recompute"),
        (["9000B"], 66, "between 0.2B and 2000B"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(words, code, told, capsys):
    assert main.main(["plan", *words]) == code
    shown = capsys.readouterr().err
    assert told in shown
    assert shown.startswith("ullage: error: ")
    assert "Traceback" not in shown
