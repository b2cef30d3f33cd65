"""A run that is killed and resumed equals the run that was not, bit for bit."""

import os
import subprocess
import sys

import pytest
from runs import assert_same_run, metrics_of, outcome_of, samples_of
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def uninterrupted(ullage, task, tmp_path_factory):
    runs = tmp_path_factory.mktemp("uninterrupted")
    outcome = ullage(*task.arguments(runs, "whole"))
    assert outcome.code == 0, outcome.stderr
    return runs / "whole"


def test_the_run_has_everything_worth_comparing(uninterrupted):
    rows = metrics_of(uninterrupted)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
    assert [row["step"] for row in rows if "eval/val/mean@2" in row] == [0, 2, 4, 6]
    assert all(row["actor/kl_ref"] > 0 for row in rows[2:])
    assert all(row["actor/kl_old"] != 0 for row in rows[2:])  # off-policy: the second mini-batch
    assert list(samples_of(uninterrupted)) == [
        *(f"eval_{step}.jsonl" for step in (0, 2, 4, 6)),
        *(f"step_{step}.jsonl" for step in range(1, 7)),
    ]
    assert outcome_of(uninterrupted) == {
        "code": 0, "reason": "finished", "phase": None, "step": 6, "resume_command": None
    }  # fmt: skip


# Three steps are an epoch: a kill in step 4 resumes at an epoch's end, one in step 3 or 6 in the middle of one.
@pytest.mark.parametrize(
    ("step", "phase"),
    [
        (0, "eval"),
        (1, "rollout"),
        (3, "save"),
        (4, "rollout"),
        (4, "reward"),
        (4, "logprob"),
        (4, "reference"),
        (4, "update"),
        (4, "eval"),
        (4, "save"),
        (6, "update"),
        (6, "export"),
    ],
)
def test_killed_in_a_phase(ullage, task, tmp_path, uninterrupted, step, phase):
    killed = ullage(*task.arguments(tmp_path, "killed"), fault=f"step={step},phase={phase},kind=sigkill")
    assert killed.code == -9, killed.stderr
    assert not (tmp_path / "killed" / "final").exists()
    resumed = ullage("resume", tmp_path / "killed")
    assert resumed.code == 0, resumed.stderr
    assert_same_run(tmp_path / "killed", uninterrupted)


@pytest.mark.parametrize("change", ["kill_before_publishing", "kill_before_latest"])
def test_killed_between_writing_and_publishing_a_checkpoint(ullage, task, tmp_path, uninterrupted, change):
    killed = ullage(*task.arguments(tmp_path, "killed"), changes=[change])
    assert killed.code == -9, killed.stderr
    assert (tmp_path / "killed" / "checkpoints" / "latest").read_text() == "step_3\n"
    assert ullage("resume", tmp_path / "killed").code == 0
    assert_same_run(tmp_path / "killed", uninterrupted)


def test_killed_twice(ullage, task, tmp_path, uninterrupted):
    ullage(*task.arguments(tmp_path, "killed"), fault="step=2,phase=update,kind=sigkill")
    assert ullage("resume", tmp_path / "killed", fault="step=5,phase=reward,kind=sigkill").code == -9
    assert ullage("resume", tmp_path / "killed").code == 0
    assert_same_run(tmp_path / "killed", uninterrupted)


def test_a_damaged_checkpoint_is_passed_over(ullage, task, tmp_path, uninterrupted):
    ullage(*task.arguments(tmp_path, "killed"), fault="step=5,phase=update,kind=sigkill")
    damage(tmp_path / "killed" / "checkpoints" / "step_4" / "optimizer.safetensors")
    resumed = ullage("resume", tmp_path / "killed")
    assert resumed.code == 0
    assert "damaged checkpoint" in resumed.stderr
    assert_same_run(tmp_path / "killed", uninterrupted)


def test_with_every_checkpoint_damaged_nothing_is_thrown_away(ullage, task, tmp_path):
    ullage(*task.arguments(tmp_path, "killed"), fault="step=3,phase=update,kind=sigkill")
    run = tmp_path / "killed"
    for folder in (run / "checkpoints").glob("step_*"):
        damage(folder / "optimizer.safetensors")
    rows = metrics_of(run)
    resumed = ullage("resume", run)
    assert resumed.code == 74
    assert f"ullage: error: every checkpoint in {run / 'checkpoints'} is damaged" in resumed.stderr
    assert metrics_of(run) == rows
    assert outcome_of(run)["resume_command"] == f"ullage resume {run}"


def test_other_data_is_refused(ullage, task, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text((task.folder / "train.jsonl").read_text())
    ullage(*task.arguments(tmp_path, "killed", data__train_files=data), fault="step=3,phase=update,kind=sigkill")
    data.write_text(data.read_text().replace("123", "124"))
    resumed = ullage("resume", tmp_path / "killed")
    assert resumed.code == 65
    assert "data_fingerprint changed since step_2 was saved" in resumed.stderr
    assert len(metrics_of(tmp_path / "killed")) == 3


def test_in_another_process(ullage, task, tmp_path, uninterrupted):
    """Other memory addresses, another hash seed, other imports than in forks of one process; and somebody's job."""
    fault = {"ULLAGE_FAULT": "step=4,phase=update,kind=sigkill", "RANK": "1", "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "ullage", *task.arguments(tmp_path, "killed")]
    assert subprocess.run(command, env=os.environ | fault, check=False).returncode == -9
    assert ullage("resume", tmp_path / "killed").code == 0
    assert_same_run(tmp_path / "killed", uninterrupted)


PPO = {
    "own": {"algorithm": "ppo", "critic__optim__lr": 1e-3, "trainer__critic_warmup": 1},
    "shared": {"algorithm": "ppo", "critic__optim__lr": 1e-2, "critic__share_actor": "true"},
}


@pytest.mark.parametrize(("critic", "phases"), [("own", ("values", "update_critic")), ("shared", ("update_critic",))])
def test_killed_with_a_critic(ullage, task, tmp_path, critic, phases):
    """The critic's weights, optimizer and counters come back as well."""
    whole = ullage(*task.arguments(tmp_path, "whole", **PPO[critic]))
    assert whole.code == 0, whole.stderr
    rows = metrics_of(tmp_path / "whole")[1:]
    assert all(row["critic/grad_norm"] > 0 for row in rows)
    assert ["actor/grad_norm" in row for row in rows] == [critic == "shared", *[True] * 5]  # the warm-up
    saved = tmp_path / "whole" / "checkpoints" / "step_6"
    assert (len(load_file(saved / "critic.safetensors")) == 2) == (critic == "shared")
    for phase in phases:
        name = f"killed-{phase}"
        killed = ullage(*task.arguments(tmp_path, name, **PPO[critic]), fault=f"step=4,phase={phase},kind=sigkill")
        assert killed.code == -9, killed.stderr
        resumed = ullage("resume", tmp_path / name)
        assert resumed.code == 0, resumed.stderr
        assert_same_run(tmp_path / name, tmp_path / "whole")


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
