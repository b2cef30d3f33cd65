"""Several ranks: the numbers of one process, and one word to the user whatever happens to which of them."""

import json
import os
import signal
import subprocess
import sys

import pytest
from runs import (
    assert_no_process_has,
    assert_same_run,
    metrics_of,
    outcome_of,
    processes_with,
    samples_of,
    wait_for,
)
from safetensors.torch import load_file

RATE = 1e-5
FEW = {
    "trainer__total_training_steps": 3,
    "actor_rollout_ref__actor__optim__lr": RATE,
    "actor_rollout_ref__actor__optim__lr_scheduler_type": "constant",
    "actor_rollout_ref__actor__optim__lr_warmup_steps": 0,
}


def train(ullage, task, runs, name, ranks, *changes, fault=None, **keys):
    arguments = task.arguments(runs, name, trainer__n_gpus_per_node=ranks, **{**FEW, **keys})
    return ullage(*arguments, changes=["fork_ranks", *changes], fault=fault)


@pytest.fixture(scope="module")
def by_ranks(ullage, task, tmp_path_factory):
    """The same run with one, two and three ranks."""
    runs = tmp_path_factory.mktemp("ranks")
    for ranks in (1, 2, 3):
        outcome = train(ullage, task, runs, f"ranks-{ranks}", ranks)
        assert outcome.code == 0, outcome.stderr
    return {ranks: runs / f"ranks-{ranks}" for ranks in (1, 2, 3)}


# Four prompts a step: with three ranks, one has two prompts and the others one; three held-out prompts are one each.
@pytest.mark.invariant
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_do_what_one_process_does(by_ranks, ranks):
    one, many = by_ranks[1], by_ranks[ranks]
    assert samples_of(many) == samples_of(one)
    rows = zip(metrics_of(many), metrics_of(one), strict=True)
    for row, expected in rows:
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-7)
    weights, expected = (load_file(run / "final" / "model.safetensors") for run in (many, one))
    assert weights.keys() == expected.keys()
    assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) <= 1e-6


def test_the_weights_that_are_compared_did_change(by_ranks, tiny_model):
    before, after = load_file(tiny_model / "model.safetensors"), load_file(by_ranks[1] / "final" / "model.safetensors")
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > RATE


@pytest.mark.invariant
def test_two_ranks_train_the_critic_that_one_does(ullage, task, tmp_path):
    ppo = {"algorithm": "ppo", "critic__optim__lr": RATE, "actor_rollout_ref__actor__use_kl_loss": "false"}
    for ranks in (1, 2):
        outcome = train(ullage, task, tmp_path, f"ranks-{ranks}", ranks, **ppo)
        assert outcome.code == 0, outcome.stderr
    one, two = tmp_path / "ranks-1", tmp_path / "ranks-2"
    assert samples_of(two) == samples_of(one)
    for row, expected in zip(metrics_of(two), metrics_of(one), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-7)
    weights, expected = (load_file(run / "checkpoints" / "step_3" / "critic.safetensors") for run in (two, one))
    assert expected["head.weight"].abs().max() > RATE
    assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) <= 1e-6


def test_a_rank_without_any_prompt(ullage, task, tmp_path):
    few = {"data__train_batch_size": 2, "data__val_max_samples": 1}
    for ranks in (1, 3):
        assert train(ullage, task, tmp_path, f"ranks-{ranks}", ranks, **few).code == 0
    assert samples_of(tmp_path / "ranks-3") == samples_of(tmp_path / "ranks-1")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_a_killed_rank_ends_the_run_with_code_80(ullage, task, tmp_path, rank, phase):
    run = tmp_path / "killed"
    outcome = train(ullage, task, tmp_path, "killed", 2, fault=f"step=3,phase={phase},kind=sigkill,rank={rank}")
    assert outcome.code == 80
    assert outcome.stderr.count("ullage: error") == 1
    assert f"ullage: error: rank {rank} was killed by SIGKILL\n" in outcome.stderr
    told = outcome_of(run)
    assert (told["code"], told["reason"]) == (80, f"rank {rank} was killed by SIGKILL")
    assert told["resume_command"] == f"ullage resume {run}"


def test_a_killed_rank_and_a_resumed_run(ullage, task, tmp_path, by_ranks):
    train(ullage, task, tmp_path, "killed", 2, fault="step=3,phase=update,kind=sigkill,rank=1")
    resumed = ullage("resume", tmp_path / "killed", changes=["fork_ranks"])
    assert resumed.code == 0, resumed.stderr
    assert_same_run(tmp_path / "killed", by_ranks[2], step=3)


def test_sigterm_on_one_rank_stops_all(ullage, task, tmp_path, by_ranks):
    outcome = train(ullage, task, tmp_path, "stopped", 2, fault="step=2,phase=rollout,kind=sigterm,rank=1")
    assert outcome.code == 75
    assert outcome.stderr.count("SIGTERM: stopped after step 2, checkpoint saved") == 1
    assert outcome_of(tmp_path / "stopped")["code"] == 75
    assert ullage("resume", tmp_path / "stopped", changes=["fork_ranks"]).code == 0
    assert_same_run(tmp_path / "stopped", by_ranks[2], step=3)


def test_an_error_of_one_rank_is_told_once(ullage, task, tmp_path):
    """Only rank 0 writes checkpoints, and the disk is full."""
    outcome = train(ullage, task, tmp_path, "full", 2, "disk_full")
    assert outcome.code == 74
    assert outcome.stderr.count("ullage: error") == 1
    assert "rank 0: disk full, need " in outcome.stderr
    assert outcome_of(tmp_path / "full")["code"] == 74


def test_an_error_of_all_ranks_is_told_once(ullage, task, tmp_path):
    outcome = train(ullage, task, tmp_path, "none", 2, actor_rollout_ref__model__path="/no/such/model")
    assert outcome.code == 66
    assert outcome.stderr.splitlines()[-2:] == [
        "ullage: error: rank 0: no such model folder: /no/such/model",
        "  fix: give a model folder, a GGUF file, a Hub id or `smollm2` (actor_rollout_ref.model.path)",
    ]
    assert outcome.stderr.count("no such model") == 1
    assert not (tmp_path / "none").exists()


def test_a_bug_of_a_rank_is_in_its_log(ullage, task, tmp_path):
    outcome = train(ullage, task, tmp_path, "bug", 2, "bug")
    assert outcome.code == 1
    assert "ullage: error: rank 0: internal error: ZeroDivisionError: a bug of ours\n" in outcome.stderr
    assert "in failing\n" in (tmp_path / "bug" / "logs" / "rank_0.log").read_text()


def test_failed_rewards_count_over_all_ranks(ullage, task, tmp_path):
    """Half of the samples may fail; all those of rank 0 do, and none of rank 1: that is half."""
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, response, target):\n    return 1.0 if target in FAIR else None\n")
    order = [json.loads(line) for line in (task.folder / "train.jsonl").read_text().splitlines()][:4]
    reward.write_text(f"FAIR = {[row['answer'] for row in order[1::2]]}\n" + reward.read_text())
    keys = {"reward": reward, "data__shuffle": "false", "data__val_files": None, "trainer__total_training_steps": 1}
    assert train(ullage, task, tmp_path, "half", 2, **keys).code == 0
    assert metrics_of(tmp_path / "half")[0]["reward/failed_fraction"] == 0.5
    more = train(ullage, task, tmp_path, "more", 2, reward__max_failure_fraction=0.4, **keys)
    assert more.code == 69
    assert "8 of 16 rewards failed (limit 40 %)" in more.stderr


def test_real_processes_stop_when_the_launcher_is_asked_to(task, tmp_path, ullage, by_ranks):
    run = tmp_path / "stopped"
    arguments = task.arguments(tmp_path, "stopped", trainer__n_gpus_per_node=2, **FEW)
    process = subprocess.Popen(
        [sys.executable, "-m", "ullage", *arguments],
        env=os.environ | {"ULLAGE_TEST_MARK": run.name, "MASTER_PORT": "1", "WORLD_SIZE": "9"},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for((run / "logs" / "rank_1.log").exists)
    process.send_signal(signal.SIGTERM)  # the ranks have not even started Python
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 75, stderr
    assert stderr.count("SIGTERM: stopped after step 0, checkpoint saved") == 1
    assert "Traceback" not in stderr + (run / "logs" / "rank_1.log").read_text()
    assert_no_process_has(run.name)
    assert ullage("resume", run, changes=["fork_ranks"]).code == 0
    assert_same_run(run, by_ranks[2], step=3)


def test_ranks_end_with_the_launcher(ullage, task, tmp_path):
    arguments = task.arguments(tmp_path, "orphans", trainer__n_gpus_per_node=2, **FEW)
    started = ullage.start(*arguments, changes=["fork_ranks"])
    wait_for((tmp_path / "orphans" / "metrics.jsonl").exists)
    assert processes_with(started.mark)  # reward workers, which outlive no rank
    os.kill(started.pid, signal.SIGKILL)
    assert started.wait().code == -9  # which also looks for processes that are left
