"""`ullage advise` as a user meets it: two questions, tables and JSON, and no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.cli.main import main

SOURCE = Path(__file__).parents[2] / "src"


def test_what_a_machine_can_train(capsys):
    assert main(["advise", "--gpu", "4090 x2"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("2x RTX 4090: 23.6 GiB usable on each GPU; 64 prompts x 8 samples a step, 512 + 1536 tokens")
    lines = told.splitlines()[3:15]
    rows = [line.split()[:2] for line in lines[::2]]
    assert rows == [[method, name] for method in ("full", "LoRA", "QLoRA") for name in ("GRPO", "PPO")]
    streamed = [line.startswith("        memory.optimizer_state=streamed ") for line in lines[1::2]]
    assert streamed == [True, True, False, True, True, True], "the state of adapters is small"
    assert "memory.offload_roles=true" in lines[3]
    assert "- a pass = FLOPs / (0.77 TFLOP/s) + bytes" in told
    assert "--ram" in told


def test_what_a_machine_would_hold_between_its_gpus(capsys):
    assert main(["advise", "--gpu", "4090 x4"]) == 0
    told = capsys.readouterr().out
    head, rest = told.split("\nwith weights shared out over the 4 GPUs, which Ullage cannot do yet:\n\n")
    assert "sharding" not in head
    rows = rest.splitlines()
    assert rows[0].split()[-1] == "sharding"
    assert rows[1].startswith("full    GRPO ")
    assert rows[2].startswith("        memory.")


def test_what_a_model_needs(capsys):
    assert main(["advise", "qwen2.5-0.5b", "--context", "1024"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Qwen2.5-0.5B: 0.49 billion parameters; 64 prompts x 8 samples a step, 256 + 768 tokens")
    assert "$" in told
    assert "cost of 1,000 steps = 1000 x seconds x USD an hour / 3600" in told


def test_what_a_model_rests_on_is_said(capsys):
    assert main(["advise", "DeepSeek-V3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "- adapters and quantisation leave experts as they are" in told
    assert "- Ullage does not run latent attention yet; its cache would hold whole keys" in told
    assert main(["advise", "--gpu", "T4"]) == 0
    assert "- T4 has no bf16 in its tensor cores: Ullage does not train on it" in capsys.readouterr().out


def test_json_of_what_a_machine_can_train(capsys):
    assert main(["advise", "--gpu", "24GiB", "--ram", "64GiB", "--json"]) == 0
    have = json.loads(capsys.readouterr().out)
    assert [each["capacity_bytes"] for each in have["advice"]] == [24 * 2**30] * 6
    assert all(each["host_bytes"] <= 64 * 2**30 and each["step_seconds"] > 0 for each in have["advice"])
    assert have["sharded"] == []


def test_json_of_what_a_model_needs(capsys):
    assert main(["advise", "8B", "--json"]) == 0
    need = json.loads(capsys.readouterr().out)
    full = need["advice"][0]
    assert (full["method"], full["algorithm"], need["model"]) == ("full", "grpo", "8B")
    assert all(each["peak_bytes"] <= each["capacity_bytes"] for each in full["fits_on"])
    assert full["fits_on"][0]["usd_per_1000_steps"] > 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["advise"], 2, "give a model or --gpu"),
        (["advise", "8B", "--gpu", "h200"], 2, "for both, `ullage plan 8B --gpu 'h200'`"),
        (["advise", "--gpu", "h201"], 2, "nearest: H20, H200"),
        (["advise", "--gpu", "h200", "--ram", "lots"], 2, "'lots' is no size"),
        (["advise", "8B", "--ram", "64GiB"], 2, "--ram without --gpu"),
        (["advise", "qwen2.5-7c"], 66, "Qwen2.5-7B"),
        (["advise", "8B", "--context", "3"], 2, "too short"),
    ],
)
def test_bad_input_is_two_lines_and_a_code(words, code, says, capsys):
    assert main(words) == code
    error = capsys.readouterr().err
    assert says in error
    assert len(error.strip().splitlines()) == 2


def test_it_starts_without_torch():
    script = "import sys; from ullage.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, "-c", script, "advise", "--gpu", "h200"]
    found = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
