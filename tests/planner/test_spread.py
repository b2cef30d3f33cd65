"""Which layout is taken: whole replicas while they fit, then what exchanges least."""

from dataclasses import replace

import pytest

from ullage.config.load import load_mapping
from ullage.planner.hardware import parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout
from ullage.planner.sharding import Sharding
from ullage.planner.spread import best_sharding, exchanged_bytes, fits

GRPO = load_mapping({"algorithm.name": "grpo"}).config


def test_replicas_are_taken_where_they_fit():
    machine = parse_machine("8xH200")
    assert best_sharding(find_shape("Qwen2.5-1.5B"), GRPO, machine) == Sharding(data=8)


def test_a_model_too_large_for_one_gpu_is_spread_with_the_least_exchange():
    machine, shape = parse_machine("8xH200"), find_shape("Qwen2.5-32B")
    found = best_sharding(shape, GRPO, machine)
    assert found is not None
    assert found.ranks == 8
    assert not fits(Layout(shape, GRPO, ranks=8), machine)
    chosen = Layout(shape, GRPO, sharding=found)
    assert fits(chosen, machine)
    half = Layout(shape, GRPO, sharding=replace(found, shards=max(1, found.shards // 2)))
    assert found.shards == 1 or not fits(half, machine)


def test_none_where_nothing_fits():
    assert best_sharding(find_shape("Llama-3.1-405B"), GRPO, parse_machine("2x24GiB")) is None


def test_host_memory_counts_for_a_whole_node():
    shape, machine = find_shape("Qwen2.5-0.5B"), parse_machine("8xH200")
    needed = 8 * sum(Layout(shape, GRPO, ranks=8).host().values())
    assert fits(Layout(shape, GRPO, ranks=8), replace(machine, host_bytes=needed))
    assert not fits(Layout(shape, GRPO, ranks=8), replace(machine, host_bytes=needed - 1))


def test_what_is_exchanged_by_hand():
    """64 prompts x 8 samples of 1024 tokens; 64 slots: 8 rounds of 512 tokens on one rank, 4 on two."""
    shape = find_shape("Qwen2.5-7B")
    assert exchanged_bytes(Layout(shape, GRPO)) == 0
    gradients = 2 * 2 * shape.parameters / 2
    assert exchanged_bytes(Layout(shape, GRPO, ranks=2)) == gradients
    sharded = Layout(shape, GRPO, sharding=Sharding(data=2, shards=2))
    micro_batches = -(-256 * 1024 // sharded.update_pass.tokens)
    gathered = 2 * shape.parameters / 2 * (3 * micro_batches + 4 * 512)
    assert exchanged_bytes(sharded) == pytest.approx(gradients + gathered)
    tensor = Layout(shape, GRPO, sharding=Sharding(tensor=2))
    assert exchanged_bytes(tensor) == pytest.approx(4 * 4 * 512 * 1024 * 28 * 2 * 3584 / 2)
