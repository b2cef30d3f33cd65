"""Fixes: each of them makes the run fit, and the first costs least."""

from dataclasses import replace

import pytest

from ullage.config.load import load_mapping
from ullage.config.settle import ACTOR_TOKENS
from ullage.planner.fixes import least
from ullage.planner.hardware import find_gpu, gpus, parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.plan import plan

GIB = 2**30
SEVEN = find_shape("Qwen2.5-7B")


def planned(settings, gpu, ram=None):
    machine = parse_machine(gpu)
    config = load_mapping({"algorithm.name": "grpo"} | settings).config
    return plan(SEVEN, config, replace(machine, host_bytes=ram) if ram else machine)


def changed(settings, fix):
    """The plan's settings with what a fix says."""
    given = dict(part.split("=") for part in fix.change.split())
    return settings | {key: int(value) if value.isdigit() else value for key, value in given.items()}


@pytest.mark.parametrize(
    ("settings", "gpu"),
    [
        ({}, "16GiB"),
        ({"algorithm.name": "ppo"}, "24GiB"),
        ({"memory.optimizer_state": "device"}, "24GiB"),
        ({"memory.optimizer_state": "device", "memory.gradients": "weights"}, "80GiB"),
        ({"data.max_response_length": 30000}, "24GiB"),
        ({"memory.budget": "16GiB"}, "h200"),
    ],
)
def test_every_fix_makes_it_fit(settings, gpu):
    made = planned(settings, gpu)
    assert made.fits is False
    assert made.fixes
    for fix in made.fixes:
        if "cannot do yet" in fix.alters:
            assert planned(settings, fix.change.split("'")[1]).spread.peak_bytes <= parse_machine(gpu).gpu.memory_bytes
            continue
        if fix.change.startswith("--gpu"):
            name = fix.change.split("'")[1]
            fixed = planned(settings, name)
            smaller = [card for card in gpus() if card.trains and card.memory_bytes < find_gpu(name).memory_bytes]
            assert all(card.memory_bytes < fix.peak_bytes for card in smaller)
        else:
            fixed = planned(changed(settings, fix), gpu)
        assert fixed.fits, fix.change
        assert fix.peak_bytes <= fixed.capacity_bytes


def test_a_run_that_fits_needs_no_fix():
    assert planned({}, "24GiB").fixes == ()


def test_leaving_keys_open_comes_before_anything_that_changes_what_is_learned():
    made = planned({"memory.optimizer_state": "device", ACTOR_TOKENS: 2048}, "24GiB")
    assert made.fixes[0].change == f"memory.optimizer_state=auto {ACTOR_TOKENS}=auto"
    kinds = [fix.change.split("=")[0] for fix in planned({"memory.optimizer_state": "device"}, "100GiB").fixes]
    assert kinds == [
        "memory.optimizer_state",
        "memory.rounding",
        "actor_rollout_ref.actor.optim.optimizer",
        "memory.rounding",
        "actor_rollout_ref.model.lora_rank",
        "actor_rollout_ref.model.lora_rank",
        "--gpu 'H200'",
        "--gpu '100GiB x2'",
    ]


def test_a_budget_can_be_raised_where_the_gpu_has_more():
    made = planned({"memory.budget": "16GiB"}, "h200")
    config = load_mapping({"algorithm.name": "grpo"}).config
    needed = least(SEVEN, config, parse_machine("h200"))
    assert made.fixes[0].change == f"memory.budget={-(-needed // GIB)}GiB"


def test_a_critic_gets_adapters_where_there_is_one():
    ppo = [fix.change for fix in planned({"algorithm.name": "ppo"}, "24GiB").fixes]
    assert any("critic.model.lora_rank=16" in change for change in ppo)
    assert not any("critic" in fix.change for fix in planned({}, "16GiB").fixes)


def test_fewer_gpus_share_the_host_s_memory():
    made = planned({}, "4090 x8", ram=512 * GIB)
    assert made.fits is False
    assert (made.fixes[0].change, made.fixes[0].alters) == (
        "--gpu 'RTX 4090 x4'",
        "4 of the GPUs: fewer processes share the host's memory",
    )
    assert planned({}, "4090 x4", ram=512 * GIB).fits
    assert not planned({}, "4090 x5", ram=512 * GIB).fits
    assert not any("fewer" in fix.alters for fix in planned({}, "16GiB x2", ram=512 * GIB).fixes)


def test_host_memory_is_kept_to():
    config = load_mapping({"algorithm.name": "grpo"}).config
    machine = replace(parse_machine("24GiB"), host_bytes=95 * GIB)
    assert least(SEVEN, config, machine) > 24 * GIB  # 85 GiB of state cannot leave beside a checkpoint
    assert least(SEVEN, config, replace(machine, host_bytes=GIB)) is None
    made = planned({}, "24GiB", ram=95 * GIB)
    assert made.fits is False
    kinds = [fix.change.split("=")[0].split()[0] for fix in made.fixes]
    assert {"actor_rollout_ref.model.lora_rank", "--ram", "--gpu"} <= set(kinds)
    for fix in made.fixes:
        if fix.change.startswith("--ram"):
            assert planned({}, "24GiB", ram=int(fix.change.split()[1].removesuffix("GiB")) * GIB).fits
        elif not fix.change.startswith("--gpu"):
            assert planned(changed({}, fix), "24GiB", ram=95 * GIB).fits, fix.change
