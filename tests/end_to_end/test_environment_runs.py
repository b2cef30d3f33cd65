"""Runs with an environment: the page's own example trains; what cannot work is refused before a weight is loaded."""

import json
import os
import re
from pathlib import Path
from statistics import fmean

import pytest
from runs import metrics_of, samples_of, write_lines

ROOT = Path(__file__).parent.parent.parent

TWICE = """
from ullage.environments import Turn

class Environment:
    def reset(self, row):
        self.turns = 0

    def step(self, action):
        self.turns += 1
        right = sum(character == "7" for character in action)
        if self.turns == 1:
            return Turn("+", reward=right)
        return Turn(reward=right, done=True)
"""


def episodes(folder, **changes):
    """Keys of a run of episodes on the small task; evaluations included, reward functions not."""
    rows = [{"prompt": f"{number}=", "answer": str(number)} for number in range(10)]
    return {
        "data__train_files": write_lines(folder / "numbers.jsonl", rows),
        "data__val_files": folder / "numbers.jsonl",
        "data__train_batch_size": 8,
        "data__max_response_length": 16,
        "reward": None,
        "actor_rollout_ref__rollout__n": 8,
        "actor_rollout_ref__rollout__max_num_seqs": 64,
        "actor_rollout_ref__actor__ppo_mini_batch_size": None,
        "actor_rollout_ref__actor__use_kl_loss": "false",
        "actor_rollout_ref__actor__optim__lr_scheduler_type": "constant",
        "actor_rollout_ref__actor__optim__lr_warmup_steps": 0,
        "trainer__total_training_steps": 3,
        "trainer__save_freq": -1,
        "trainer__test_freq": -1,
        "trainer__val_before_train": "false",
        **changes,
    }


def test_the_environment_of_the_page_trains(ullage, task, tmp_path):
    text = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), flags=re.DOTALL)[0]
    assert len(text.splitlines()) <= 30
    file = tmp_path / "guess.py"
    file.write_text(text)
    keys = episodes(tmp_path, environment__name=file, environment__max_turns=4, trainer__total_training_steps=6)
    outcome = ullage(*task.arguments(tmp_path, "guess", **keys, environment__kwargs__tries=4))
    assert outcome.code == 0, outcome.stderr
    run = tmp_path / "guess"
    rows = metrics_of(run)
    assert fmean(row["reward/environment"] for row in rows[3:]) > fmean(row["reward/environment"] for row in rows[:3])
    assert all(row["reward/failed_fraction"] == 0 for row in rows)
    assert all(1 < row["reward/environment/turns"] < 4 for row in rows)
    assert all(row["rollout/logprob_gap_mean"] <= 1e-6 for row in rows)
    samples = [json.loads(line) for text in samples_of(run).values() for line in text.splitlines()]
    # The reward of a game is one over its guesses, and its transcript has what each wrong one was told.
    for sample in samples:
        told = sum(line in ("more", "less", "a number?") for line in sample["response"].split("\n"))
        assert sample["reward"] in (0.0, 1 / (told + 1))
    assert {sample["reward"] for sample in samples} >= {0.0, 0.5, 1.0}
    assert rows[-1]["eval/numbers/pass@1"] > 0


@pytest.mark.slow
@pytest.mark.invariant
def test_a_run_of_episodes_resumed_is_the_run_that_was_not_killed(ullage, task, tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    keys = episodes(tmp_path, environment__name=tmp_path / "twice.py", trainer__save_freq=1)
    assert ullage(*task.arguments(tmp_path, "whole", **keys)).code == 0
    killed = ullage(*task.arguments(tmp_path, "killed", **keys), fault="step=2,phase=update,kind=sigkill")
    assert killed.code == -9
    assert ullage("resume", tmp_path / "killed").code == 0
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")
    assert samples_of(tmp_path / "killed") == samples_of(tmp_path / "whole")


def test_gdpo_weighs_the_environment_as_a_reward_of_its_own(ullage, task, tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    (tmp_path / "short.py").write_text("def score(response): return -len(response)")
    keys = episodes(
        tmp_path, environment__name=tmp_path / "twice.py", algorithm="gdpo", trainer__total_training_steps=1
    )
    outcome = ullage(*task.arguments(tmp_path, "both", **{**keys, "reward": tmp_path / "short.py"}))
    assert outcome.code == 0, outcome.stderr
    (row,) = metrics_of(tmp_path / "both")
    assert row["reward/mean"] == pytest.approx(row["reward/environment"] + row["reward/short"])
    assert row["reward/short"] < 0 < row["reward/environment"]


def test_an_environment_that_always_fails_ends_the_run(ullage, task, tmp_path):
    (tmp_path / "broken.py").write_text(TWICE.replace("self.turns += 1", "raise OSError('no board')"))
    outcome = ullage(
        *task.arguments(tmp_path, "broken", **episodes(tmp_path, environment__name=tmp_path / "broken.py"))
    )
    assert outcome.code == 69
    assert "64 of 64 rewards failed (limit 50 %): first: environment " in outcome.stderr
    assert "step raised OSError: no board at broken.py:9" in outcome.stderr


@pytest.mark.slow
@pytest.mark.invariant
def test_two_ranks_play_what_one_process_plays(ullage, task, tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    keys = episodes(tmp_path, environment__name=tmp_path / "twice.py", data__train_batch_size=5)
    for ranks in (1, 2):
        arguments = task.arguments(tmp_path, f"ranks-{ranks}", **keys, trainer__n_gpus_per_node=ranks)
        outcome = ullage(*arguments, changes=["fork_ranks"])
        assert outcome.code == 0, outcome.stderr
    assert samples_of(tmp_path / "ranks-2") == samples_of(tmp_path / "ranks-1")
    for row, expected in zip(metrics_of(tmp_path / "ranks-2"), metrics_of(tmp_path / "ranks-1"), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_the_python_tool_without_a_sandbox_is_refused_before_the_model_is_read(ullage, task, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['sandlock'] = None\n")
    keys = episodes(tmp_path, environment__name="tools", environment__kwargs__tools="[python]")
    keys["actor_rollout_ref__model__path"] = tmp_path / "no_such_model"
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    outcome = ullage(*task.arguments(tmp_path, "unsafe", **keys), PATH=str(tmp_path), PYTHONPATH=path)
    assert outcome.code == 78
    assert "the python tool needs a sandbox, and none works here" in outcome.stderr
    assert "ullage[sandbox]" in outcome.stderr
