"""A small training task as the mapping that user code gives."""

import copy
import json

import pytest

REWARD = """
def score(prompt, response, target):
    return sum(a == b for a, b in zip(response, target)) / len(target)
"""


@pytest.fixture(scope="session")
def task_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    (folder / "reward.py").write_text(REWARD)
    for name, numbers in (("train", range(123, 999, 67)), ("val", (135, 246))):
        rows = [{"prompt": f"{number}=", "answer": str(number)} for number in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def config(task_files, tiny_model, tmp_path):
    """Copy three digits; two steps in which every sample counts. Change a copy: `with_keys(config, ...)`."""
    return {
        "data": {
            "train_files": [str(task_files / "train.jsonl")],
            "val_files": [str(task_files / "val.jsonl")],
            "train_batch_size": 4,
            "max_prompt_length": 8,
            "max_response_length": 3,
        },
        "actor_rollout_ref": {
            "model": {"path": str(tiny_model)},
            "actor": {"ppo_mini_batch_size": 2, "use_kl_loss": True, "optim": {"lr": 1e-3}},
            "rollout": {"n": 4},
        },
        "reward": {"functions": [{"path": str(task_files / "reward.py")}], "num_workers": 1},
        "trainer": {"default_local_dir": str(tmp_path / "runs"), "total_training_steps": 2, "val_before_train": False},
    }


@pytest.fixture
def with_keys(config):
    """`with_keys({"algorithm.name": "ppo"})`: the task's config with other values."""

    def changed(keys):
        tree = copy.deepcopy(config)
        for path, value in keys.items():
            *sections, name = path.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return tree

    return changed
