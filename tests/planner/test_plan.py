"""Plans: what binds, what fits, which levers help, and what `--json` promises."""

from dataclasses import replace

import pytest

from ullage.base.errors import UsageError
from ullage.config.load import load_mapping
from ullage.config.tree import Config
from ullage.planner.hardware import parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.plan import plan, with_key

SEVEN = find_shape("Qwen2.5-7B")


def planned(settings, gpu=None, shape=SEVEN):
    return plan(shape, load_mapping({"algorithm.name": "grpo"} | settings).config, parse_machine(gpu) if gpu else None)


def test_the_peak_is_the_largest_phase_not_the_sum():
    made = planned({})
    totals = {phase.name: phase.total_bytes for phase in made.phases}
    assert made.peak_bytes == max(totals.values()) == totals["update"]
    assert made.binding.name == "update"


def test_slack_is_three_percent_of_what_is_allocated():
    phase = planned({}).binding
    assert phase.components["slack"] == pytest.approx(0.03 * phase.allocated_bytes, abs=1)
    assert phase.total_bytes == phase.allocated_bytes + phase.components["slack"] + phase.components["context"]


def test_the_verdict_follows_capacity():
    assert planned({}).fits is None
    assert planned({}, "h200").fits is True
    large = planned({}, "80GiB")
    assert large.fits is False
    assert large.verdict.startswith("does not fit: update needs ")
    exactly = planned({}, f"{planned({}).peak_bytes / 2**20:.0f}MiB")
    assert exactly.machine is not None
    assert exactly.fits is (exactly.peak_bytes <= exactly.machine.gpu.memory_bytes)


def test_host_memory_can_be_what_does_not_fit():
    streamed = load_mapping({"algorithm.name": "grpo", "memory.optimizer_state": "streamed"}).config
    machine = parse_machine("h200 x2")
    needed = plan(SEVEN, streamed, machine).host_bytes * 2  # both ranks of the node
    assert plan(SEVEN, streamed, replace(machine, host_bytes=needed)).fits is True
    short = plan(SEVEN, streamed, replace(machine, host_bytes=needed - 1))
    assert short.fits is False
    assert short.verdict.startswith("does not fit: host memory needs ")


def test_levers_state_what_planning_again_with_them_saves():
    made = planned({"memory.recompute": "none"})
    by_change = {lever.change: lever for lever in made.levers}
    assert {"memory.recompute=full", "memory.optimizer_state=streamed", "memory.compile=true"} <= set(by_change)
    again = planned({"memory.recompute": "full"})
    assert by_change["memory.recompute=full"].saves_bytes == made.peak_bytes - again.peak_bytes
    assert by_change["memory.recompute=full"].cost.slowdown == 0.18
    assert [lever.worth for lever in made.levers] == sorted((lever.worth for lever in made.levers), reverse=True)


def test_levers_already_pulled_or_without_effect_are_not_offered():
    made = planned({"memory.recompute": "full", "memory.optimizer_state": "streamed", "memory.compile": True})
    keys = {lever.key for lever in made.levers}
    assert not keys & {"memory.recompute", "memory.optimizer_state", "memory.compile", "memory.offload_roles"}


def test_json_has_the_promised_keys():
    told = planned({}, "4090 x2").as_json()
    assert {
        "fits", "capacity_bytes", "peak_bytes", "binding_phase", "phases", "host", "disk", "levers", "chosen",
        "assumptions",
    } <= set(told)  # fmt: skip
    assert set(told["phases"][0]) == {"name", "components", "total_bytes"}
    assert all(phase["total_bytes"] == sum(phase["components"].values()) for phase in told["phases"])
    assert set(told["levers"][0]) == {"change", "saves_bytes", "slowdown"}
    assert any("whole replica" in text for text in told["assumptions"])
    known = {"weights", "gradients", "optimizer", "master", "activations", "working_layer", "head", "kv_cache"}
    known |= {"graphs", "gather", "buffers", "context", "slack"}
    assert all(set(phase["components"]) <= known for phase in told["phases"])


def test_one_key_changes_and_nothing_else():
    changed = with_key(Config(), "actor_rollout_ref.actor.optim.optimizer", "sgd")
    assert changed.actor_rollout_ref.actor.optim.optimizer == "sgd"
    assert with_key(changed, "actor_rollout_ref.actor.optim.optimizer", "adamw") == Config()


def test_an_unknown_machine_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="nearest: H200"):
        planned({}, "h2000")
