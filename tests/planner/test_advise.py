"""Advice: the model of time by hand, the search against an exhaustive one, and what the measured rows say."""

from dataclasses import replace

import pytest

from ullage.base.errors import UsageError
from ullage.config.tree import Config
from ullage.planner.advise import (
    ALGORITHMS,
    METHODS,
    Work,
    base_config,
    combinations,
    fastest,
    least_bytes,
    options,
    trains,
    utilisation,
    what_fits,
    what_it_needs,
)
from ullage.planner.hardware import Machine, find_gpu, parse_machine
from ullage.planner.model_shape import bundled_shapes, find_shape
from ullage.planner.plan import plan

GIB = 2**30


def test_utilisation_is_the_measured_one_at_the_measured_sizes_and_flat_beyond():
    assert utilisation(0.494e9) == pytest.approx(0.277)
    assert utilisation(1.54e9) == pytest.approx(0.383)
    assert utilisation(7.6e9) == pytest.approx(0.504)
    assert utilisation(1e6) == 0.277
    assert utilisation(70e9) == 0.504
    assert utilisation((0.494e9 * 1.54e9) ** 0.5) == pytest.approx((0.277 + 0.383) / 2)


def test_seconds_of_a_step_by_hand():
    gpu = replace(find_gpu("h200"), tflops_bf16=1000.0, bandwidth=5000.0, pcie_gbs=50.0, interconnect_gbs=1000.0)
    work = Work(
        active=7_600_000_000,
        parameters=1_000_000_000,
        flops=1e15,
        prefill=0.008e15,
        samples=128,
        slots=64,
        response=100,
        decode_flops=15.2e9,
        weight_bytes=15_000_000_000,
        cache_bytes=0,
        state_bytes=5e11,
        moved_bytes=4e10,
        beside_bytes=0.0,
    )
    # 2 rounds x 100 x 15 GB / 3 TB/s; 1.008e15 / 504e12; 0.5 TB / 5 TB/s; 40 GB / 40 GB/s
    assert work.seconds(gpu, 1) == pytest.approx(1.0 + 2.0 + 0.1 + 1.0)
    # Two replicas: one round, half the passes, the same optimizer, and 2 bytes x 1e9 each way over 500 GB/s.
    assert work.seconds(gpu, 2) == pytest.approx(0.5 + 1.0 + 0.1 + 1.0 + 0.004)
    # Copies beside the update count where they take longer.
    assert replace(work, beside_bytes=4e11).seconds(gpu, 1) == pytest.approx(1.0 + 10.0 + 0.1 + 1.0)


def test_an_update_takes_what_was_measured_on_the_h200():
    # update_h200_speed.json: 7B, 15,416 tokens forward and backward in 1.3269 s; the bench counts the same FLOPs.
    shape = find_shape("Qwen2.5-7B")
    seconds = 15_416 * 6 * shape.active_parameters / (989.4e12 * utilisation(shape.active_parameters))
    assert seconds == pytest.approx(1.3269, rel=0.06)


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_combination_is_a_config_that_its_settings_make(method, algorithm):
    for config, settings in combinations(method, algorithm, 2048):
        tree = {}
        for key, value in settings.items():
            *path, last = key.split(".")
            node = tree
            for part in path:
                node = node.setdefault(part, {})
            node[last] = value
        assert Config.model_validate(tree) == config


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen3-8B", "Mixtral-8x7B"])
def test_the_least_of_two_is_the_least_of_all(name):
    shape = find_shape(name)
    for method in METHODS:
        for algorithm in ALGORITHMS:
            everything = min(option.peak_bytes for option in options(shape, method, algorithm, 2048, 1))
            assert least_bytes(shape, method, algorithm, 2048) == everything


def test_an_option_says_what_the_plan_says():
    shape, machine = find_shape("Qwen2.5-7B"), parse_machine("h200")
    for (config, _), option in zip(
        combinations("full", "grpo", 2048), options(shape, "full", "grpo", 2048, 1), strict=True
    ):
        planned = plan(shape, config, machine)
        assert option.peak_bytes == planned.peak_bytes
        assert option.host_bytes == planned.host_bytes
        assert option.fits(machine) == planned.fits


def test_the_largest_that_fits_is_the_largest_and_the_fastest_way():
    machine = parse_machine("4090")
    for advice in what_fits(machine, 2048):
        assert advice.option.peak_bytes <= machine.gpu.memory_bytes
        larger = [shape for shape in bundled_shapes().values() if shape.parameters > advice.shape.parameters]
        assert not any(
            least_bytes(shape, advice.method, advice.algorithm, 2048) <= machine.gpu.memory_bytes for shape in larger
        )
        ways = [
            option for option in options(advice.shape, advice.method, advice.algorithm, 2048, 1) if option.fits(machine)
        ]
        assert advice.seconds == min(option.work.seconds(machine.gpu, 1) for option in ways)


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
        assert all(each.option.fits(each.machine) and trains(each.machine.gpu) for each in advice)
        smallest = min(each.machine.gpu.memory_bytes for each in advice)
        assert smallest >= least_bytes(shape, method, algorithm, 2048)
    first = needs["QLoRA", "grpo"][0]
    assert first.cost == pytest.approx(1000 * first.seconds * first.instance.price / 3600)


def test_cards_without_bf16_or_cuda_are_not_proposed():
    assert not trains(find_gpu("T4"))
    assert not trains(find_gpu("MI300X"))
    assert trains(find_gpu("A10G"))


def test_nothing_fits_is_an_answer():
    tiny = Machine(gpu=find_gpu("1GiB"))
    assert [advice.option for advice in what_fits(tiny, 2048)] == [None] * 6
    assert fastest([], tiny) is None
    assert what_fits(tiny, 2048)[0].as_json()["fits"] is False
