"""`ullage plan` as a user meets it: real processes, no torch, one line for what is wrong."""

import json
import os
import re
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
    assert main.main(["plan", "Qwen2.5-7B", "--gpu", "4090 x2", "memory.optimizer_state=device"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Qwen2.5-7B: 7.62 B parameters on 2x RTX 4090\n")
    assert "does not fit: update needs" in told
    assert "\nrollout        ###" in told
    assert "\nchosen, what needs least:\n" in told
    assert "\nwhat would fit, the cheapest change first:\n  memory.optimizer_state=auto " in told
    assert "  memory.optimizer_state=streamed" in told
    assert "assumed:" in told


def test_it_chooses_and_says_why(capsys):
    assert main.main(["plan", "Qwen2.5-7B", "memory.budget=24GiB", "--check"]) == 0
    told = capsys.readouterr().out
    assert "\nchosen, the fastest that fits:\n" in told
    assert re.search(r"\n  memory.optimizer_state=streamed +update would need [\d.]+ GiB of 24.0 GiB with dev", told)
    assert re.search(r"\na step         \d+:\d\d: rollout [\d.]+ s, logprob [\d.]+ s, update ", told)
    assert "of 24.0 GiB, " in told
    assert "what would fit" not in told
    assert main.main(["plan", "Qwen2.5-7B", "--gpu", "h200", "memory.budget=24GiB", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["capacity_bytes"] == 24 * 2**30
    assert made["chosen"]["memory.gradients"]["value"] == "host"
    assert set(made["chosen"]["memory.gradients"]) == {"value", "why"}
    assert made["seconds"]["step"] > made["seconds"]["rollout"] > 0


def test_it_draws(tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main.main(["plan", "0.5B", "--gpu", "24GiB", "--html", str(page)]) == 0
    assert "update" in page.read_text(encoding="utf-8")
    assert main.main(["plan", "0.5B", "--html", str(tmp_path / "none" / "plan.html")]) == 74
    assert "fits: " not in capsys.readouterr().err


def test_it_explains_every_number(capsys):
    assert main.main(["plan", "Qwen2.5-7B", "--explain"]) == 0
    told = capsys.readouterr().out
    assert "weights = 14.2 GiB = 2 B x P  [P=7,615,616,512]" in told
    assert "master = 28.4 GiB = 4 B x P" in told
    assert " of device memory; update binds\n" in told
    assert "\nseconds:\n  a pass = FLOPs / " in told


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
        (["8B", "memory.budget=lots"], 78, "memory.budget"),
        (["8B", "memory.budget=100MiB"], 2, "too small for a GPU"),
        (["8B", "--ram", "64GiB"], 2, "--ram needs --gpu"),
        (["8B", "--gpu", "h200", "--ram", "lots"], 2, "'lots' is no size"),
        (["9000B"], 66, "between 0.2B and 2000B"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy(words, code, told, capsys):
    assert main.main(["plan", *words]) == code
    shown = capsys.readouterr().err
    assert told in shown
    assert shown.startswith("ullage: error: ")
    assert "Traceback" not in shown


def told_by_the_command(*words):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "ullage", "plan", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["Qwen2.5-7B", "memory.budget=8GiB"], "does not fit: the weights alone are 14.2 GiB of 8.0 GiB"),
        (["Qwen2.5-7B", "--gpu", "24GiB", "--ram", "16GiB"], "does not fit: host memory needs "),
    ],
)
def test_the_impossible_is_one_line_and_a_code(words, line):
    done = told_by_the_command(*words, "--check")
    assert (done.returncode, done.stderr) == (79, "")
    assert [text for text in done.stdout.splitlines() if text.startswith(line)]


def test_what_was_guessed_is_said():
    told = told_by_the_command("8B", "--gpu", "24GiB").stdout
    assert "8B: a dense shape between Qwen2.5-7B and Qwen2.5-14B is assumed" in told
    assert "24GiB: the speed of " in told
    assert "host memory suffices" in told
