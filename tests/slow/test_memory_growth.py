"""A long run holds no more memory at its end than after its first steps."""

import json
import os
import subprocess
import sys

import pytest

STEPS = 200
REWARD = """
def score(prompt, response, target):
    return sum(a == b for a, b in zip(response, target)) / len(target)
"""


@pytest.mark.slow
def test_two_hundred_steps_do_not_grow(tmp_path, tiny_model):
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{number}=", "answer": str(number)} for number in range(100, 132)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "data.train_files": tmp_path / "train.jsonl",
        "data.val_files": tmp_path / "train.jsonl",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 8,
        "data.max_response_length": 8,
        "algorithm": "ppo",
        "actor_rollout_ref.model.path": tiny_model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.ignore_eos": "true",  # the same lengths in every step
        "reward": tmp_path / "reward.py",
        "reward.num_workers": 1,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": 20,
        "trainer.default_local_dir": tmp_path,
        "trainer.experiment_name": "long",
    }
    arguments = [f"{key}={value}" for key, value in keys.items()]
    # Peaks of single phases are noisy where glibc keeps freed memory in several arenas.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-m", "ullage", "train", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "long" / "memory.jsonl").read_text().splitlines()]
    for phase in ("rollout", "logprob", "reference", "values", "update", "update_critic"):
        peaks = {line["step"]: line["allocated_peak_bytes"] for line in lines if line["phase"] == phase}
        early = max(peaks[step] for step in range(15, 26))
        late = max(peaks[step] for step in range(STEPS - 10, STEPS + 1))
        assert late - early < 4 << 20, (phase, early, late)
