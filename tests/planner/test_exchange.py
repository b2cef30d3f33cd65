"""What ranks send each other, by hand, and the seconds that it takes."""

import pytest

from ullage.config.load import load_mapping
from ullage.planner import exchange
from ullage.planner.hardware import find_gpu
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout
from ullage.planner.seconds import step_seconds, step_work
from ullage.planner.sharding import Sharding

GRPO = load_mapping({"algorithm.name": "grpo"}).config
EVALUATED = load_mapping({"algorithm.name": "grpo", "algorithm.rollout_correction.rollout_is": "token"}).config
SEVEN = find_shape("Qwen2.5-7B")
P = SEVEN.parameters
H200 = find_gpu("h200")


def layout_of(sharding, shape=SEVEN, config=GRPO):
    return Layout(shape, config, sharding=sharding)


def test_a_ring_sends_all_but_one_part():
    assert [exchange.others(ranks) for ranks in (1, 2, 8)] == [0.0, 0.5, 0.875]


def test_replicas_send_gradients_there_and_back_for_every_mini_batch():
    layout = layout_of(Sharding(data=4))
    assert exchange.of_replicas(layout, layout.actor, 3) == 2 * 3 * 2 * P * 3 / 4
    assert exchange.of_shards(layout, layout.actor, 3) == 0
    sharded = layout_of(Sharding(data=4, shards=4))
    assert exchange.of_replicas(sharded, sharded.actor, 3) == 0


def test_shards_gather_weights_twice_a_pass_and_reduce_in_float32():
    layout = layout_of(Sharding(data=8, shards=8))
    assert exchange.of_shards(layout, layout.actor, 5) == pytest.approx(5 * 7 / 8 * (2 * 2 * P + 4 * P))
    # Two copies over four ranks each: a quarter of the gradients also goes between the copies, there and back.
    copies = layout_of(Sharding(data=8, shards=4))
    between = 2 * 4 * P / 4 * 1 / 2
    assert exchange.of_shards(copies, copies.actor, 5) == pytest.approx(5 * (3 / 4 * 8 * P + between), rel=1e-9)


def test_matrices_send_sums_and_sequences_keys_and_values():
    layout = layout_of(Sharding(tensor=4))
    assert exchange.of_matrices(layout, layout.actor.shape, 100) == 2 * 2 * 0.75 * 2 * 100 * 3584 * 28
    assert exchange.of_sequences(layout, layout.actor.shape, 100) == 0
    split = layout_of(Sharding(sequence=4))
    assert exchange.of_sequences(split, SEVEN, 100) == 2 * 3 * 2 * 100 * 512 * 28  # 4 heads of 128 keys
    assert exchange.of_matrices(split, SEVEN, 100) == 0
    once = exchange.forward(split, SEVEN, 100)
    assert (once, exchange.backward(split, SEVEN, 100)) == (2 * 3 * 2 * 100 * 512 * 28, 2 * once)


def test_an_update_sends_sums_forward_backward_and_again():
    layout = layout_of(
        Sharding(tensor=2), config=load_mapping({"algorithm.name": "grpo", "memory.recompute": 0.5}).config
    )
    work, tokens = step_work(layout)["update"], 64 * 512 + 512 * 511
    assert work.exchanged == pytest.approx(2.5 * exchange.of_matrices(layout, layout.actor.shape, tokens))
    assert work.gathered == 0


def test_work_is_divided_by_what_divides_it():
    whole, samples, width, sequence = (
        step_work(layout_of(sharding, config=EVALUATED))
        for sharding in (Sharding(), Sharding(data=4), Sharding(tensor=4), Sharding(sequence=4))
    )
    for name in ("logprob", "update"):
        assert samples[name].flops == pytest.approx(whole[name].flops / 4, rel=1e-3)
        assert width[name].flops == pytest.approx(whole[name].flops / 4, rel=1e-3)
        assert sequence[name].flops == pytest.approx(whole[name].flops / 4, rel=1e-3)
    # A sequence is decoded by every rank that has part of it in training; a matrix is not.
    assert sequence["rollout"].steps == whole["rollout"].steps == 4 * samples["rollout"].steps
    assert width["rollout"].read_bytes == pytest.approx(whole["rollout"].read_bytes / 4, rel=1e-3)
    # Each rank steps its own part of the state.
    sharded = step_work(layout_of(Sharding(data=4, shards=4)))
    assert sharded["optimizer_step"].traffic == pytest.approx(whole["optimizer_step"].traffic / 4, rel=1e-6)
    assert samples["optimizer_step"].traffic == whole["optimizer_step"].traffic


def test_a_token_waits_for_all_weights_where_they_are_shared_out():
    layout = layout_of(Sharding(data=8, shards=8), find_shape("Llama-3.1-70B"))
    held = 2 * layout.shape.parameters
    rollout = step_work(layout)["rollout"]
    assert rollout.gathered == pytest.approx(7 / 8 * held)
    # 450 GB/s one way: 0.27 s a token, longer than 80 layers take to start (0.11 s) or to read (0.05 s).
    prefill = rollout.prefill.seconds(H200)
    assert step_seconds(layout, H200)["rollout"] - prefill == pytest.approx(rollout.steps * 7 / 8 * held / 450e9)
