"""Every algorithm trains: on a task that a tiny model can learn in seconds, its reward rises from chance."""

import re
from pathlib import Path
from statistics import fmean

import pytest
import torch
from runs import assert_same_run, metrics_of, samples_of, write_lines
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent.parent

SHARE_OF_DIGITS = """
def score(prompt, response, target):
    return sum(character.isdigit() for character in response) / 4
"""
HUNDREDFOLD = """
def hundredfold(prompt, response, target):
    return 100 * float(response[:1].isdigit())
"""
CHANCE = 10 / 36
"""Ten of the model's 36 symbols are digits."""
STEPS = 8
QUICK = ("grpo", "gspo", "ppo", "reinforce_plus_plus", "rloo")
SLOW = (
    "cispo", "clip_cov", "dapo", "dr_grpo", "gdpo", "gmpo", "gpg", "grpo_passk", "kl_cov", "opo",
    "raft", "reinforce_plus_plus_baseline", "remax", "sapo",
)  # fmt: skip
OPTIONS = {
    "ppo": {"critic__optim__lr": 1e-3},
    "clip_cov": {"actor_rollout_ref__actor__policy_loss__clip_cov_ratio": 0.02},
    "kl_cov": {"actor_rollout_ref__actor__policy_loss__kl_cov_ratio": 0.02},
}


def digits(folder, **changes):
    """Keys of a run that is rewarded for digits."""
    reward = folder / "share_of_digits.py"
    reward.write_text(SHARE_OF_DIGITS)
    rows = [{"prompt": f"{a}+{b}=", "answer": ""} for a in range(8) for b in range(2)]
    return {
        "data__train_files": write_lines(folder / "digits.jsonl", rows),
        "data__val_files": None,
        "data__train_batch_size": 8,
        "data__max_response_length": 4,
        "actor_rollout_ref__rollout__n": 8,
        "actor_rollout_ref__rollout__ignore_eos": "true",
        "actor_rollout_ref__actor__use_kl_loss": "false",
        "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
        "actor_rollout_ref__actor__optim__lr": 2e-3,
        "actor_rollout_ref__actor__optim__lr_scheduler_type": "constant",
        "actor_rollout_ref__actor__optim__lr_warmup_steps": 0,
        "reward": reward,
        "trainer__total_training_steps": STEPS,
        "trainer__save_freq": -1,
        "trainer__test_freq": -1,
        **changes,
    }


def rewards_of(run, name="reward/mean"):
    return [row[name] for row in metrics_of(run)]


def weights_of(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_reward_rises(ullage, task, tmp_path, name):
    outcome = ullage(*task.arguments(tmp_path, name, **digits(tmp_path, algorithm=name, **OPTIONS.get(name, {}))))
    assert outcome.code == 0, outcome.stderr
    rewards = rewards_of(tmp_path / name)
    assert len(rewards) == STEPS
    assert abs(rewards[0] - CHANCE) < 0.1
    assert fmean(rewards[-3:]) > 0.6
    assert all(row.get("actor/skipped_steps", 0) == 0 for row in metrics_of(tmp_path / name))  # none: no signal left


@pytest.mark.slow
def test_gdpo_learns_from_two_rewards_of_different_size(ullage, task, tmp_path):
    """The second function is a hundred times larger and cares for the first symbol only."""
    (tmp_path / "hundredfold.py").write_text(HUNDREDFOLD)
    functions = [{"path": str(tmp_path / f"{name}.py"), "name": function} for name, function in
                 (("share_of_digits", "score"), ("hundredfold", "hundredfold"))]  # fmt: skip
    keys = digits(tmp_path, algorithm="gdpo", trainer__total_training_steps=12)
    keys |= {"reward": None, "reward__functions": functions}
    outcome = ullage(*task.arguments(tmp_path, "gdpo", **keys))
    assert outcome.code == 0, outcome.stderr
    for name, best in (("share_of_digits", 1.0), ("hundredfold", 100.0)):
        rewards = rewards_of(tmp_path / "gdpo", f"reward/{name}")
        assert fmean(rewards[-3:]) > 0.7 * best


def test_every_algorithm_is_here():
    from ullage.base import extensions

    assert sorted([*QUICK, *SLOW, "sft"]) == extensions.known("algorithms")  # sft: test_supervised.py


@pytest.mark.parametrize("control", ["fixed", "adaptive"])
def test_kl_in_the_reward_holds_the_policy_near_the_reference(ullage, task, tmp_path, control):
    """The same run with a coefficient so large that digits are not worth it: the reward stays near chance."""
    keys = digits(
        tmp_path,
        algorithm__use_kl_in_reward="true",
        algorithm__kl_ctrl__type=control,
        algorithm__kl_ctrl__kl_coef=2.0,
        algorithm__kl_ctrl__horizon=64,
    )
    outcome = ullage(*task.arguments(tmp_path, "held", **keys))
    assert outcome.code == 0, outcome.stderr
    assert fmean(rewards_of(tmp_path / "held")[-3:]) < 0.5
    assert metrics_of(tmp_path / "held")[-1]["actor/kl_ref"] < 0.1


@pytest.mark.invariant
def test_fifty_steps_at_learning_rate_0_change_nothing(ullage, task, tiny_model, tmp_path):
    """Two mini-batches a step: old log-probs are computed beforehand, and equal the update's bit for bit."""
    reward = tmp_path / "share_of_digits.py"
    reward.write_text(SHARE_OF_DIGITS)
    keys = {
        "data__val_files": None,
        "reward": reward,
        "actor_rollout_ref__actor__optim__lr": 0,
        "actor_rollout_ref__actor__optim__weight_decay": 0.1,
        "trainer__total_training_steps": 50,
        "trainer__save_freq": -1,
        "trainer__test_freq": -1,
    }
    outcome = ullage(*task.arguments(tmp_path, "still", **keys))
    assert outcome.code == 0, outcome.stderr
    before, after = weights_of(tiny_model), weights_of(tmp_path / "still" / "final")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    rows = metrics_of(tmp_path / "still")
    assert len(rows) == 50
    for row in rows:
        assert row["actor/kl_old"] == 0.0
        assert row["actor/clip_fraction"] == 0.0
        assert row["actor/kl_ref"] == 0.0
        assert row["actor/grad_norm"] > 0


def test_a_mixture_of_experts_trains(ullage, task, tiny_architecture, tmp_path):
    folder = tiny_architecture("qwen3_moe")
    keys = digits(tmp_path, actor_rollout_ref__model__path=folder, actor_rollout_ref__actor__optim__weight_decay=0)
    outcome = ullage(*task.arguments(tmp_path, "experts", **keys))
    assert outcome.code == 0, outcome.stderr
    rewards = rewards_of(tmp_path / "experts")
    assert fmean(rewards[-3:]) > rewards[0] + 0.2
    before, after = weights_of(folder), weights_of(tmp_path / "experts" / "final")
    assert all(weight.isfinite().all() for weight in after.values())
    # Without weight decay only a gradient moves a weight: those of the router, and of each expert of each layer.
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert len(routers) == 2
    assert routers <= moved
    assert moved == set(before)


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "reinforce_plus_plus", "ppo", "gpg", "gdpo", "remax"])
def test_two_ranks_do_what_one_process_does(ullage, task, tmp_path, name):
    """Those with statistics over all ranks. Five prompts: one rank has three of them."""
    keys = digits(tmp_path, algorithm=name, data__train_batch_size=5, trainer__total_training_steps=2)
    keys |= {"actor_rollout_ref__actor__optim__lr": 1e-5} | OPTIONS.get(name, {})
    for ranks in (1, 2):
        arguments = task.arguments(tmp_path, f"ranks-{ranks}", **keys, trainer__n_gpus_per_node=ranks)
        outcome = ullage(*arguments, changes=["fork_ranks"])
        assert outcome.code == 0, outcome.stderr
    one, two = tmp_path / "ranks-1", tmp_path / "ranks-2"
    assert samples_of(two) == samples_of(one)
    for row, expected in zip(metrics_of(two), metrics_of(one), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
    weights, expected = weights_of(two / "final"), weights_of(one / "final")
    assert max(float((weights[key] - expected[key]).abs().max()) for key in expected) <= 1e-6


# --- algorithms of a user's own ---


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", [0, 1])
def test_the_algorithms_of_the_page_train(ullage, task, tmp_path, block):
    text = blocks_of("custom_algorithm.md")[block]
    assert len(text.splitlines()) <= 30
    file = tmp_path / "my_algorithm.py"
    file.write_text(text)
    keys = digits(tmp_path, algorithm=file, trainer__total_training_steps=4)
    outcome = ullage(*task.arguments(tmp_path, "own", **keys))
    assert outcome.code == 0, outcome.stderr
    rows = metrics_of(tmp_path / "own")
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.2
    assert rows[0]["actor/clip_fraction"] > 0
    resumed = ullage("resume", tmp_path / "own", "trainer.total_training_steps=5")
    assert resumed.code == 0, resumed.stderr
    assert len(metrics_of(tmp_path / "own")) == 5


CLIMB = '''
"""Climb: the best samples of a group are imitated, the others are left alone. Nobody asked for it."""

import torch

from ullage.algorithms import Assigned, TokenLoss


class Credit:
    needs = frozenset()

    def __init__(self, config):
        pass

    def has_signal(self, experience):
        return experience.valid_N

    def assign(self, experience, rewards_NT, ranks):
        rewards_N, best_N = rewards_NT.sum(-1), torch.zeros_like(experience.rewards_N)
        for group in experience.group_N.unique():
            members = experience.group_N == group
            best_N[members] = (rewards_N[members] == rewards_N[members].max()).double()
        return Assigned(best_N[:, None] * experience.mask_NT)


class Loss:
    def __init__(self, config):
        pass

    def __call__(self, logprobs_NT, old_logprobs_NT, batch):
        return TokenLoss(-batch.advantages_NT * logprobs_NT, {"actor/imitated": batch.advantages_NT})
'''


def test_a_new_algorithm_is_one_file(ullage, task, tmp_path):
    file = tmp_path / "climb.py"
    file.write_text(CLIMB)
    keys = digits(tmp_path, algorithm=file, trainer__total_training_steps=4)
    outcome = ullage(*task.arguments(tmp_path, "climb", **keys))
    assert outcome.code == 0, outcome.stderr
    rows = metrics_of(tmp_path / "climb")
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.2
    assert 0 < rows[0]["actor/imitated"] < 1


# --- groups refilled ---

MOSTLY_EQUAL = """
def score(prompt, response, target):
    return float(response[:1].isdigit()) if prompt[0] in "25" else 1.0
"""


def refilled(folder, **changes):
    """Two of eight prompts can have signal; a step wants two groups, and a run is four steps."""
    reward = folder / "mostly_equal.py"
    reward.write_text(MOSTLY_EQUAL)
    rows = [{"prompt": f"{number}=", "answer": ""} for number in range(8)]
    return digits(
        folder,
        algorithm="dapo",
        data__train_files=write_lines(folder / "eight.jsonl", rows),
        data__train_batch_size=2,
        actor_rollout_ref__actor__ppo_mini_batch_size=1,
        actor_rollout_ref__actor__optim__lr=1e-5,
        reward=reward,
        trainer__total_training_steps=4,
        trainer__save_freq=1,
        trainer__max_ckpt_to_keep=9,
        **changes,
    )


@pytest.fixture(scope="module")
def refilling(ullage, task, tmp_path_factory):
    runs = tmp_path_factory.mktemp("refilling")
    outcome = ullage(*task.arguments(runs, "whole", **refilled(runs)))
    assert outcome.code == 0, outcome.stderr
    return runs / "whole"


def test_every_step_trains_on_full_batches(refilling):
    rows = metrics_of(refilling)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert all(row["group/zero_std_fraction"] >= 0.5 for row in rows)
    for lines in samples_of(refilling).values():
        assert lines.count("\n") >= 2 * 2 * 8  # two attempts or more, of two prompts with eight samples


def test_a_killed_run_that_refills_is_resumed_exactly(ullage, task, tmp_path, refilling):
    killed = ullage(*task.arguments(tmp_path, "killed", **refilled(tmp_path)), fault="step=3,phase=update,kind=sigkill")
    assert killed.code == -9, killed.stderr
    resumed = ullage("resume", tmp_path / "killed")
    assert resumed.code == 0, resumed.stderr
    assert_same_run(tmp_path / "killed", refilling, step=4)


@pytest.mark.invariant
def test_two_ranks_refill_as_one(ullage, task, tmp_path, refilling):
    arguments = task.arguments(tmp_path, "two", **refilled(tmp_path, trainer__n_gpus_per_node=2))
    outcome = ullage(*arguments, changes=["fork_ranks"])
    assert outcome.code == 0, outcome.stderr
    assert samples_of(tmp_path / "two") == samples_of(refilling)
    for row, expected in zip(metrics_of(tmp_path / "two"), metrics_of(refilling), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-7)
