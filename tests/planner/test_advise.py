"""Advice: the search against what every model needs at least, and what plans of the same settings say."""

from dataclasses import replace

import pytest

from ullage.base.errors import UsageError
from ullage.config.load import load_mapping
from ullage.planner.advise import (
    ALGORITHMS,
    METHODS,
    Advice,
    base_config,
    least_bytes,
    what_fits,
    what_it_needs,
    what_it_would_need,
    what_would_fit,
)
from ullage.planner.hardware import Machine, find_gpu, parse_machine
from ullage.planner.model_shape import bundled_shapes, find_shape
from ullage.planner.plan import plan

GIB = 2**30


def test_methods_set_what_they_say():
    full, _ = base_config("full", "grpo", 4096)
    assert (full.data.max_prompt_length, full.data.max_response_length) == (1024, 3072)
    assert full.actor_rollout_ref.model.lora_rank == 0
    adapted, settings = base_config("QLoRA", "ppo", 4096)
    assert adapted.actor_rollout_ref.model.quantization == "nf4"
    assert adapted.critic.model.lora_rank == adapted.actor_rollout_ref.model.lora_rank == 32
    assert settings["algorithm.name"] == "ppo"
    with pytest.raises(UsageError, match="too short"):
        base_config("full", "grpo", 7)


def test_an_option_is_the_plan_that_its_settings_make():
    machine = parse_machine("h200")
    for advice in what_fits(machine, 2048):
        settings = {"actor_rollout_ref.rollout.max_num_seqs": 64, "memory.recompute": "full"} | advice.option.settings
        made = plan(advice.shape, load_mapping(settings).config, machine)
        assert advice.option.peak_bytes == made.peak_bytes
        assert advice.option.binding_phase == made.binding.name
        assert advice.option.host_bytes == made.host_bytes
        assert advice.seconds == pytest.approx(made.step_seconds)
        assert made.fits


def test_the_largest_that_fits_is_the_largest_and_the_fastest_way():
    machine = parse_machine("4090")
    for advice in what_fits(machine, 2048):
        assert advice.option.peak_bytes <= machine.gpu.memory_bytes
        larger = [shape for shape in bundled_shapes().values() if shape.parameters > advice.shape.parameters]
        assert not any(
            least_bytes(shape, advice.method, advice.algorithm, 2048) <= machine.gpu.memory_bytes for shape in larger
        )
        config, _ = base_config(advice.method, advice.algorithm, 2048)
        assert advice.seconds == pytest.approx(plan(advice.shape, config, machine).step_seconds)


def test_more_memory_or_less_context_never_means_a_smaller_model():
    def sizes(text, context):
        return [advice.shape.parameters for advice in what_fits(parse_machine(text), context)]

    assert all(small <= large for small, large in zip(sizes("24GiB", 2048), sizes("80GiB", 2048), strict=True))
    assert all(long <= short for long, short in zip(sizes("24GiB", 16384), sizes("24GiB", 1024), strict=True))


def test_host_memory_limits_what_is_streamed():
    rich = {(a.method, a.algorithm): a for a in what_fits(parse_machine("4090"), 2048)}
    poor = {(a.method, a.algorithm): a for a in what_fits(replace(parse_machine("4090"), host_bytes=32 * GIB), 2048)}
    assert poor["full", "grpo"].shape.parameters < rich["full", "grpo"].shape.parameters
    assert all(advice.option.host_bytes <= 32 * GIB for advice in poor.values())


def test_a_seed_claim_70b_with_adapters_does_not_fit_80_gb():
    # seed-corrections: its bf16 weights alone are 140 GB; four bits fit.
    shape = find_shape("Llama-3.1-70B")
    assert least_bytes(shape, "LoRA", "grpo", 2048) > 140e9
    assert least_bytes(shape, "QLoRA", "grpo", 2048) < 80e9


def test_what_a_model_needs_is_ordered_by_cost_and_every_entry_fits():
    shape = find_shape("Qwen2.5-7B")
    needs = what_it_needs(shape, 2048)
    assert set(needs) == {(method, algorithm) for method in METHODS for algorithm in ALGORITHMS}
    for (method, algorithm), advice in needs.items():
        costs = [each.cost for each in advice if each.cost is not None]
        assert costs == sorted(costs)
        assert len(costs) > 10
        assert all(each.option.peak_bytes <= each.machine.gpu.memory_bytes for each in advice)
        assert all(each.machine.gpu.trains for each in advice)
        known = [each for each in advice if each.machine.host_bytes]
        assert all(each.option.host_bytes * each.machine.count <= each.machine.host_bytes for each in known)
        smallest = min(each.machine.gpu.memory_bytes for each in advice)
        assert smallest >= least_bytes(shape, method, algorithm, 2048)
    first = needs["QLoRA", "grpo"][0]
    assert first.cost == pytest.approx(1000 * first.seconds * first.instance.price / 3600)


def test_what_a_machine_would_hold_between_its_gpus_is_told_apart():
    machine = parse_machine("h100 x8")
    found = [each for each in what_fits(machine, 2048) if each.algorithm == "grpo"]
    whole = {(each.method, each.algorithm): each.shape.parameters for each in found}
    spread = what_would_fit(machine, 2048, found)
    assert [each.method for each in spread] == ["full", "LoRA", "QLoRA"]
    for advice in spread:
        assert advice.shape.parameters > whole[advice.method, advice.algorithm]
        assert advice.option.peak_bytes <= machine.gpu.memory_bytes
        assert advice.sharding.ranks == 8
        told = advice.as_json()
        assert told["fits"] is False
        assert told["sharding"]["data"] * told["sharding"]["tensor"] * told["sharding"]["sequence"] == 8
    assert what_would_fit(parse_machine("h100"), 2048, found) == []


def test_machines_that_would_hold_a_large_model_are_told_where_few_gpus_hold_it_whole():
    shape = find_shape("Llama-3.1-70B")
    whole = [
        Advice(method="QLoRA", algorithm="grpo", machine=parse_machine(name), shape=shape, option=None)
        for name in ("h100", "h200", "b200")
    ]
    spread = what_it_would_need(shape, 2048, {("full", "ppo"): [], ("QLoRA", "grpo"): whole})
    assert spread["QLoRA", "grpo"] == []  # three kinds of GPU suffice
    assert len(spread["full", "ppo"]) == 3
    for advice in spread["full", "ppo"]:
        assert advice.option.peak_bytes <= advice.machine.gpu.memory_bytes
        host = advice.machine.host_bytes
        assert host is None or advice.option.host_bytes * advice.machine.count <= host
    costs = [each.cost for each in spread["full", "ppo"] if each.cost is not None]
    assert costs == sorted(costs)


def test_cards_without_bf16_or_cuda_are_not_proposed():
    assert not find_gpu("T4").trains
    assert not find_gpu("MI300X").trains
    assert find_gpu("A10G").trains


def test_nothing_fits_is_an_answer():
    tiny = Machine(gpu=find_gpu("1GiB"))
    assert [advice.option for advice in what_fits(tiny, 2048)] == [None] * 6
    assert what_fits(tiny, 2048)[0].as_json()["fits"] is False
