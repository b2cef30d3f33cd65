"""A supervised warm start: given answers are learned, measured and resumed, and reinforcement learning goes on."""

import random

from runs import assert_same_run, metrics_of, write_lines


def keys(tmp_path, **changes):
    numbers = [f"{number:03d}" for number in random.Random(0).sample(range(1000), 220)]
    rows = [{"prompt": f"{n}=", "completion": n, "answer": n} for n in numbers]
    return {
        "algorithm": "sft",
        "data__train_files": write_lines(tmp_path / "train.jsonl", rows[:200]),
        "data__val_files": write_lines(tmp_path / "val.jsonl", rows[200:]),
        "data__train_batch_size": 20,
        "data__max_response_length": 4,
        "actor_rollout_ref__rollout__n": None,
        "actor_rollout_ref__rollout__temperature": None,
        "actor_rollout_ref__rollout__max_num_seqs": 128,
        "actor_rollout_ref__actor__ppo_mini_batch_size": None,
        "actor_rollout_ref__actor__use_kl_loss": "false",
        "actor_rollout_ref__actor__optim__lr": 3e-3,
        "actor_rollout_ref__actor__optim__lr_scheduler_type": "constant",
        "trainer__total_epochs": 12,
        "trainer__total_training_steps": None,
        "trainer__save_freq": -1,
        "trainer__test_freq": -1,
        **changes,
    }


def test_answers_are_learned_and_reinforcement_learning_goes_on(ullage, task, tmp_path):
    outcome = ullage(*task.arguments(tmp_path, "warm", **keys(tmp_path)))
    assert outcome.code == 0, outcome.stderr
    rows = metrics_of(tmp_path / "warm")
    evaluated = [row for row in rows if "eval/val/loss" in row]
    assert evaluated[0]["step"] == 0
    assert evaluated[0]["eval/val/loss"] > 3.0  # log of 37 symbols is 3.6
    assert evaluated[-1]["eval/val/loss"] < 1.0
    score = next(name for name in evaluated[0] if name.startswith("eval/val/mean@"))
    assert evaluated[-1][score] > evaluated[0][score] + 0.4
    trained = [row for row in rows if "actor/loss" in row]
    assert len(trained) == 120
    assert "rollout/logprob_gap_mean" not in trained[0]
    assert trained[0]["response/length_mean"] == 4.0

    goes_on = task.arguments(
        tmp_path,
        "after",
        **keys(
            tmp_path,
            algorithm="grpo",
            actor_rollout_ref__model__path=tmp_path / "warm" / "final",
            actor_rollout_ref__rollout__n=4,
            trainer__total_epochs=None,
            trainer__total_training_steps=1,
            data__val_files=None,
        ),
    )
    assert ullage(*goes_on).code == 0
    (step,) = metrics_of(tmp_path / "after")
    assert step["reward/mean"] > 0.4


def test_a_killed_run_is_continued_and_needs_no_reward(ullage, task, tmp_path):
    changes = {
        "reward": None,
        "trainer__total_epochs": None,
        "trainer__total_training_steps": 6,
        "trainer__save_freq": 2,
    }
    whole, killed = (task.arguments(tmp_path, name, **keys(tmp_path, **changes)) for name in ("whole", "killed"))
    assert ullage(*whole).code == 0
    assert ullage(*killed, fault="step=5,phase=update,kind=sigkill").code != 0
    assert ullage("resume", tmp_path / "killed").code == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_rows_without_an_answer_are_refused(ullage, task, tmp_path):
    data = write_lines(tmp_path / "plain.jsonl", [{"prompt": "12=", "answer": "12"}] * 20)
    outcome = ullage(*task.arguments(tmp_path, "none", **keys(tmp_path, data__train_files=data)))
    assert outcome.code == 65
    assert f"{data}:1: no completion to learn from" in outcome.stderr
