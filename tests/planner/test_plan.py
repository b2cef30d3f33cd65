"""Plans: what binds, what fits, which levers help, and what `--json` promises."""

from dataclasses import replace

import pytest

from ullage.base.errors import UsageError
from ullage.config.load import load_mapping
from ullage.config.settle import PATHS, open_keys, plain, value_of, with_key
from ullage.config.tree import Config
from ullage.planner.components import CONTEXT, GIB
from ullage.planner.hardware import parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout
from ullage.planner.plan import plan
from ullage.planner.seconds import step_seconds

SEVEN = find_shape("Qwen2.5-7B")
PULLED_OUT = plain(Config(), "cuda")
"""No key left open, no lever but recompute pulled."""


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
    beside = sum(phase.components[name] for name in ("slack", "context", "graphs"))
    assert phase.total_bytes == phase.allocated_bytes + beside


def test_the_verdict_follows_capacity():
    assert planned({}).fits is None
    assert planned({}, "h200").fits is True
    large = planned(PULLED_OUT, "80GiB")
    assert large.fits is False
    assert large.verdict.startswith("does not fit: update needs ")
    exactly = planned(PULLED_OUT, f"{planned(PULLED_OUT).peak_bytes / 2**20:.0f}MiB")
    assert exactly.fits is (exactly.peak_bytes <= exactly.capacity_bytes)


def test_host_memory_can_be_what_does_not_fit():
    streamed = load_mapping({"algorithm.name": "grpo"} | PULLED_OUT | {"memory.optimizer_state": "streamed"}).config
    machine = parse_machine("h200 x2")
    needed = plan(SEVEN, streamed, machine).host_bytes * 2  # both ranks of the node
    assert plan(SEVEN, streamed, replace(machine, host_bytes=needed)).fits is True
    short = plan(SEVEN, streamed, replace(machine, host_bytes=needed - 1))
    assert short.fits is False
    assert short.verdict.startswith("does not fit: host memory needs ")


def test_levers_state_what_planning_again_with_them_saves_and_costs():
    made = planned({"memory.recompute": "none"})
    by_change = {lever.change: lever for lever in made.levers}
    assert {"memory.recompute=full", "memory.optimizer_state=streamed", "memory.compile=true"} <= set(by_change)
    again = planned({"memory.recompute": "full"})
    lever = by_change["memory.recompute=full"]
    assert lever.saves_bytes == made.peak_bytes - again.peak_bytes
    assert lever.slowdown == pytest.approx(again.step_seconds / made.step_seconds - 1)
    assert lever.slowdown > 0.02 > 0 > by_change["memory.compile=true"].slowdown
    assert [lever.worth for lever in made.levers] == sorted((lever.worth for lever in made.levers), reverse=True)


def test_levers_already_pulled_or_without_effect_are_not_offered():
    made = planned({"memory.recompute": "full", "memory.optimizer_state": "streamed", "memory.compile": True})
    keys = {lever.key for lever in made.levers}
    assert not keys & {"memory.recompute", "memory.optimizer_state", "memory.compile", "memory.offload_roles"}
    assert all(lever.saves_bytes > 0.005 * made.peak_bytes for lever in made.levers)


def test_open_keys_are_chosen_where_there_is_something_to_fit():
    without = planned({})
    assert without.chosen == {}
    assert open_keys(without.config) == []
    made = planned({}, "24GiB")
    assert made.fits
    assert set(made.chosen) == set(PATHS.values())
    for key, choice in made.chosen.items():
        assert value_of(made.config, key) == choice["value"]
        assert choice["why"]
    set_by_hand = planned({"memory.gradients": "host"}, "24GiB")
    assert "memory.gradients" not in set_by_hand.chosen


def test_a_budget_is_a_machine_and_a_limit_of_one():
    alone = planned({"memory.budget": "24GiB"})
    assert (alone.capacity_bytes, alone.fits) == (24 * GIB, True)
    assert any("speed of" in text for text in alone.assumptions)
    ranks = {"trainer.n_gpus_per_node": 4, "trainer.nnodes": 2}
    assert planned({"memory.budget": "24GiB"} | ranks).machine.gpus == 8
    limited = planned({"memory.budget": "24GiB"}, "h200")
    assert limited.as_json()["capacity_bytes"] == 24 * GIB
    assert limited.peak_bytes <= 24 * GIB
    assert "memory.budget: 24GiB of the 139.8 GiB there are" in limited.assumptions
    assert planned({"memory.budget": "200GiB"}, "h200").capacity_bytes == parse_machine("h200").gpu.memory_bytes


def test_a_budget_below_the_weights_is_said_to_be_one():
    made = planned({"memory.budget": "8GiB"}, "h200")
    assert made.fits is False
    assert made.verdict == "does not fit: the weights alone are 14.2 GiB of 8.0 GiB"


def test_seconds_are_those_of_the_model_of_time():
    made = planned({}, "h200")
    assert made.seconds == step_seconds(Layout(SEVEN, made.config), parse_machine("h200").gpu)
    assert made.as_json()["seconds"]["step"] == pytest.approx(sum(made.seconds.values()))
    assert "seconds are those of one H200" in planned({}).assumptions


def test_what_earlier_runs_measured_is_in_the_slack():
    plain = planned({}).phases
    scaled = plan(SEVEN, load_mapping({"algorithm.name": "grpo"}).config, scale={"update": 1.1}).phases
    for before, after in zip(plain, scaled, strict=True):
        ratio = 1.1 if before.name == "update" else 1.0
        beside = CONTEXT + before.components.get("graphs", 0)
        assert after.total_bytes == pytest.approx(1.03 * ratio * before.allocated_bytes + beside, abs=2)


def test_pinned_memory_is_a_part_of_the_host_s():
    made = planned(PULLED_OUT | {"memory.optimizer_state": "streamed"}, "h200")
    assert made.pinned_bytes == made.host["optimizer"] == 12 * SEVEN.parameters
    assert made.as_json()["host"]["pinned_bytes"] == made.pinned_bytes
    assert planned(PULLED_OUT, "h200").pinned_bytes == 0


def test_nodes_are_assumed_to_be_as_fast_as_one():
    config = load_mapping({"algorithm.name": "grpo"}).config
    assert any("different nodes" in text for text in plan(SEVEN, config, parse_machine("h200 x8", 2)).assumptions)
    assert not any("different nodes" in text for text in planned({}, "h200 x8").assumptions)


def test_json_has_the_promised_keys():
    told = planned({}, "4090 x2").as_json()
    assert {
        "fits", "capacity_bytes", "peak_bytes", "binding_phase", "phases", "host", "disk", "levers", "chosen",
        "assumptions", "seconds", "fixes", "sharding",
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
