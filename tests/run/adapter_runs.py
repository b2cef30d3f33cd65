"""A short task for runs that train adapters, and what such runs leave behind."""

import json
import random

from ullage.cli.main import main

REWARD = """\
def score(prompt, response, target):
    return sum(a == b for a, b in zip(response, target)) / len(target)
"""


def trainer_of(folder, model, **always):
    """`train("name", key=value)`: a run of four steps; double underscores are dots."""
    rng = random.Random(0)
    for name, count in (("train", 16), ("val", 3)):
        rows = ({"prompt": f"{n}=", "answer": str(n)} for n in rng.sample(range(100, 1000), count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    keys = {
        "data.train_files": folder / "train.jsonl",
        "data.val_files": folder / "val.jsonl",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 8,
        "data.max_response_length": 3,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.lora_rank": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "actor_rollout_ref.rollout.n": 4,
        "reward": folder / "reward.py",
        "reward.num_workers": 1,
        "trainer.total_training_steps": 4,
        "trainer.save_freq": 2,
        "trainer.test_freq": 2,
        "trainer.default_local_dir": folder / "runs",
        **dotted(always),
    }

    def run(name, code=0, **changes):
        given = keys | {"trainer.experiment_name": name} | dotted(changes)
        assert main(["train", *(f"{key}={value}" for key, value in given.items())]) == code
        return folder / "runs" / name

    return run


def dotted(keys):
    return {key.replace("__", "."): value for key, value in keys.items()}


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def contents(folder):
    """Every file of a folder, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
