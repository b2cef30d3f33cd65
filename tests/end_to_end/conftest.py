"""A small training task, and `ullage` run on it in processes that are checked for what they leave behind."""

import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import assert_no_process_has, write_lines

HERE = Path(__file__).parent
REWARD = """
def score(prompt, response, target):
    return sum(a == b for a, b in zip(response, target)) / len(target)
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str


class Started:
    """A running command line."""

    def __init__(self, server, pid, folder, mark):
        self.server, self.pid, self.folder, self.mark = server, pid, folder, mark

    def wait(self):
        """How it ended; nothing it started may be left."""
        code = self.server.ask({"wait": self.pid})
        assert_no_process_has(self.mark)
        texts = [(self.folder / name).read_text() for name in ("stdout", "stderr")]
        assert "Traceback" not in texts[1], texts[1]
        return Outcome(code, *texts)


class ForkServer:
    def __init__(self, folder):
        self.folder = folder
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])}
        self.process = subprocess.Popen(
            [sys.executable, HERE / "fork_server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, *arguments, fault=None, changes=(), **environment):
        mark = secrets.token_hex(8)
        folder = self.folder / mark
        folder.mkdir()
        order = {
            "arguments": [str(argument) for argument in arguments],
            # A fork keeps the environment its parent was started with in /proc; only children show the mark.
            "environment": {"ULLAGE_TEST_MARK": mark, "ULLAGE_FAULT": fault or "", **environment},
            "changes": list(changes),
            "stdout": str(folder / "stdout"),
            "stderr": str(folder / "stderr"),
        }
        return Started(self, self.ask(order), folder, mark)

    def __call__(self, *arguments, **options):
        """Run `ullage` with these arguments to its end."""
        return self.start(*arguments, **options).wait()


@pytest.fixture(scope="session")
def ullage(tmp_path_factory):
    """`ullage("train", ...)` in a fork of a warm process; `ullage.start(...)` does not wait."""
    server = ForkServer(tmp_path_factory.mktemp("outputs"))
    yield server
    server.process.stdin.close()
    assert server.process.wait(10) == 0


@dataclass(frozen=True)
class Task:
    """Copy three digits: data, reward and the keys of a run of six steps that touches every phase."""

    folder: Path
    keys: dict

    def arguments(self, runs, name, **changes):
        """`train` and its overrides; double underscores in a keyword are dots, a key set to None is left out."""
        keys = self.keys | {"trainer.default_local_dir": runs, "trainer.experiment_name": name}
        keys |= {key.replace("__", "."): value for key, value in changes.items()}
        return ["train", *(f"{key}={value}" for key, value in keys.items() if value is not None)]


@pytest.fixture(scope="session")
def task(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("task")
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{number}=", "answer": str(number)} for number in range(123, 999, 67)]
    assert len(rows) == 14  # three batches of four, and two rows that an epoch leaves out
    write_lines(folder / "train.jsonl", rows)
    write_lines(folder / "val.jsonl", [{"prompt": f"{number}=", "answer": str(number)} for number in (135, 246, 357)])
    return Task(
        folder,
        {
            "data.train_files": folder / "train.jsonl",
            "data.val_files": folder / "val.jsonl",
            "data.train_batch_size": 4,
            "data.max_prompt_length": 8,
            "data.max_response_length": 3,
            "actor_rollout_ref.model.path": tiny_model,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
            "actor_rollout_ref.actor.shuffle": "true",
            "actor_rollout_ref.actor.use_kl_loss": "true",
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
            "actor_rollout_ref.actor.optim.lr_warmup_steps": 2,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.rollout.val_kwargs.n": 2,
            "reward": folder / "reward.py",
            "reward.num_workers": 1,
            "trainer.total_training_steps": 6,
            "trainer.save_freq": 1,
            "trainer.test_freq": 2,
        },
    )
