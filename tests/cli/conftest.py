"""A small finished run, made once; tests that change it take a copy."""

import json
import random
import shutil

import pytest

from ullage.cli.main import main

REWARD = """\
def score(prompt, response, target):
    return sum(a == b for a, b in zip(response, target)) / len(target)
"""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """A folder with training and held-out prompts and a reward function."""
    folder = tmp_path_factory.mktemp("inputs")
    numbers = random.Random(0).sample(range(100, 1000), 24)
    for name, part in (("train", numbers[:20]), ("val", numbers[20:])):
        rows = [json.dumps({"prompt": f"{number}=", "answer": str(number)}) + "\n" for number in part]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_model, inputs):
    """A run of four steps with checkpoints and evaluations at 2 and 4; never write to it."""
    root = tmp_path_factory.mktemp("finished")
    keys = {
        "data.train_files": inputs / "train.jsonl",
        "data.val_files": inputs / "val.jsonl",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 3,
        "actor_rollout_ref.model.path": tiny_model,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.val_kwargs.n": 2,
        "reward": inputs / "reward.py",
        "reward.num_workers": 1,
        "trainer.total_training_steps": 4,
        "trainer.save_freq": 2,
        "trainer.test_freq": 2,
        "trainer.default_local_dir": root / "runs",
        "trainer.experiment_name": "small",
    }
    assert main(["train", *(f"{key}={value}" for key, value in keys.items())]) == 0
    return root / "runs" / "small"


@pytest.fixture
def run_copy(finished, tmp_path):
    """A run of one's own, in the folder `runs` of the test's folder."""
    return shutil.copytree(finished, tmp_path / "runs" / "small")
