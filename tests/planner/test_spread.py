"""Weights shared out over GPUs: what is told would fit, no layout is much faster, and no plan says that it fits."""

import json
from dataclasses import replace

import pytest

from ullage.config.load import load_mapping
from ullage.planner.choose import Space, peak_phase
from ullage.planner.fixes import least
from ullage.planner.hardware import parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout
from ullage.planner.plan import plan
from ullage.planner.seconds import step_seconds
from ullage.planner.sharding import Sharding, divides, shardings
from ullage.planner.spread import best_spread, more_gpus, thinnest

GIB = 2**30
GRPO = load_mapping({"algorithm.name": "grpo"}).config
SEVENTY = find_shape("Llama-3.1-70B")
EIGHT = parse_machine("h100 x8")


def test_seventy_billion_on_eight_gpus_of_80_gb():
    spread = best_spread(SEVENTY, GRPO, EIGHT)
    assert spread.sharding.ranks == 8
    assert spread.sharding.shards * spread.sharding.tensor > 1
    layout = Layout(SEVENTY, spread.config, sharding=spread.sharding)
    assert spread.peak_bytes == peak_phase(layout).total_bytes <= EIGHT.gpu.memory_bytes
    assert spread.seconds == step_seconds(layout, EIGHT.gpu)
    assert spread.host == layout.host()
    assert any("gather" in phase.components for phase in spread.phases)
    assert any("Ullage does not shard yet" in text for text in spread.assumptions)


def test_no_layout_that_fits_is_much_faster():
    machine = parse_machine("h200 x4")
    spread = best_spread(SEVENTY, GRPO, machine)
    tried = []
    for sharding in shardings(machine):
        if divides(SEVENTY, sharding) and sharding != Sharding(data=4):
            way, fits = Space(SEVENTY, GRPO, 4, sharding).best(machine.gpu, machine.gpu.memory_bytes, None)
            tried += [way.seconds] if fits else []
    assert len(tried) > 6
    assert spread.step_seconds <= 1.05 * min(tried)  # all but the most promising are timed with plain keys


def test_host_memory_limits_it():
    loose = best_spread(SEVENTY, GRPO, EIGHT)
    needed = 8 * loose.host_bytes
    tight = best_spread(SEVENTY, GRPO, replace(EIGHT, host_bytes=needed * 2 // 3))
    assert tight is not None
    assert 8 * tight.host_bytes <= needed * 2 // 3
    assert best_spread(SEVENTY, GRPO, replace(EIGHT, host_bytes=40 * GIB)) is None


def test_a_budget_limits_it():
    budget = load_mapping({"algorithm.name": "grpo", "memory.budget": "60GiB"}).config
    assert best_spread(SEVENTY, budget, EIGHT).peak_bytes <= 60 * GIB


def test_a_plan_tells_it_and_does_not_fit():
    made = plan(SEVENTY, GRPO, EIGHT)
    assert made.fits is False
    assert made.spread == best_spread(SEVENTY, GRPO, EIGHT)
    assert made.verdict.startswith("does not fit: ")
    assert not any("Ullage cannot do yet" in fix.alters for fix in made.fixes)  # more GPUs are not needed for it
    told = json.loads(json.dumps(made.as_json()))["sharding"]
    assert (told["supported"], told["data"] * told["tensor"] * told["sequence"]) == (False, 8)
    assert told["peak_bytes"] == max(phase["total_bytes"] for phase in told["phases"])
    assert told["seconds"]["step"] == pytest.approx(made.spread.step_seconds)
    assert set(told["chosen"]) == set(made.chosen)


def test_a_run_that_fits_or_has_one_gpu_is_not_spread():
    assert plan(find_shape("Qwen2.5-7B"), GRPO, parse_machine("h100 x8")).as_json()["sharding"] is None
    assert plan(find_shape("Qwen2.5-7B"), GRPO, parse_machine("16GiB")).spread is None
    assert best_spread(find_shape("Llama-3.1-405B"), GRPO, parse_machine("2x24GiB")) is None


def test_more_gpus_are_the_fewest_that_hold_it():
    one, shape = parse_machine("16GiB"), find_shape("Qwen2.5-7B")
    fix = more_gpus(shape, GRPO, one)
    assert fix.change == "--gpu '16GiB x2'"
    shared = "weights, gradients and state shared out over 2 GPUs (data 2, shards 2)"
    assert fix.alters == f"{shared}, which Ullage cannot do yet"
    assert least(shape, GRPO, one) > 16 * GIB >= fix.peak_bytes
    assert plan(shape, GRPO, replace(one, count=2)).spread is not None
    assert plan(shape, GRPO, one).fixes[-1] == fix
    large = more_gpus(find_shape("Qwen2.5-72B"), GRPO, parse_machine("4090 x2"))
    assert large.change == "--gpu 'RTX 4090 x8'"
    fewer = Sharding(data=14, shards=14)
    assert least(find_shape("Qwen2.5-72B"), GRPO, parse_machine("4090 x7", 2), {}, fewer) > 23.6 * GIB
    assert more_gpus(find_shape("DeepSeek-V3"), GRPO, parse_machine("4060 Ti")) is None


def test_layers_too_large_to_gather_are_held_in_parts():
    """One layer's experts are 23 GB; three copies of it and its gradients in float32 are more than an H200 has."""
    node, shape = parse_machine("h200 x8"), find_shape("DeepSeek-V3")
    whole = Sharding(data=128, shards=128)
    assert least(shape, GRPO, replace(node, nodes=16), {}, whole) > node.gpu.memory_bytes
    fix = more_gpus(shape, GRPO, node)
    assert fix.change == "--gpu 'H200 x8' --nodes 2"
    assert "over 16 GPUs (data 2, tensor 8, shards 2)" in fix.alters
    assert thinnest(shape, GRPO, replace(node, nodes=2)) == (Sharding(data=2, tensor=8, shards=2), fix.peak_bytes)
