"""Every memory lever in a whole run: the same samples, numbers and weights, bit for bit where sums keep their order."""

import pytest
from runs import contents, metrics_of, samples_of

ROLES = {
    "algorithm": "ppo",
    "actor_rollout_ref__actor__use_kl_loss": "true",
    "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 24,
    "critic__optim__lr": 1e-3,
    "trainer__total_training_steps": 3,
    "trainer__save_freq": -1,
    "trainer__test_freq": -1,
}
"""Actor, critic and reference, each in several micro-batches."""

LEVERS = {
    "recompute": {"memory__recompute": "full"},
    "recompute half": {"memory__recompute": 0.5},
    "recompute matmuls": {"memory__recompute": "matmuls"},
    "offload sync": {"memory__activation_offload": "sync"},
    "offload async": {"memory__activation_offload": "async", "memory__activation_groups": 2},
    "streamed": {"memory__optimizer_state": "streamed"},
    "host": {"memory__optimizer_state": "host"},
    "gradients on host": {"memory__gradients": "host"},
    "roles wait": {"memory__offload_roles": "true"},
    "together": {
        "memory__recompute": "full",
        "memory__activation_offload": "async",
        "memory__optimizer_state": "streamed",
        "memory__gradients": "host",
        "memory__offload_roles": "true",
    },
}


@pytest.fixture(scope="module")
def plain(ullage, task, tmp_path_factory):
    runs = tmp_path_factory.mktemp("levers")
    outcome = ullage(*task.arguments(runs, "plain", **ROLES, memory__recompute="none"))
    assert outcome.code == 0, outcome.stderr
    return runs / "plain"


@pytest.mark.parametrize("name", LEVERS)
def test_a_lever_changes_nothing(ullage, task, tmp_path, plain, name):
    outcome = ullage(*task.arguments(tmp_path, "run", **ROLES, **LEVERS[name]))
    assert outcome.code == 0, outcome.stderr
    assert metrics_of(tmp_path / "run") == metrics_of(plain)
    assert samples_of(tmp_path / "run") == samples_of(plain)
    assert contents(tmp_path / "run" / "final") == contents(plain / "final")


def test_a_run_with_all_levers_is_resumed_bit_for_bit(ullage, task, tmp_path, plain):
    keys = ROLES | LEVERS["together"] | {"trainer__save_freq": 1}
    killed = ullage(*task.arguments(tmp_path, "run", **keys), fault="step=2,phase=update_critic,kind=sigkill")
    assert killed.code == -9
    assert ullage("resume", tmp_path / "run").code == 0
    assert contents(tmp_path / "run" / "final") == contents(plain / "final")
