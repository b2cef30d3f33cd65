"""Each component by hand: small numbers whose formula can be followed on paper."""

from dataclasses import replace

import pytest

from ullage.planner import components as c
from ullage.planner.components import GIB, MIB, Pass
from ullage.planner.drawing import cache_tokens
from ullage.planner.model_shape import find_shape

SEVEN = find_shape("Qwen2.5-7B")
THIRTY_TWO = find_shape("Qwen2.5-32B")


def test_weights_in_each_precision():
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    rest = SEVEN.parameters - linear
    assert c.weights(SEVEN).bytes == 2 * 7_615_616_512
    assert c.weights(SEVEN, width=4).bytes == 4 * 7_615_616_512
    assert c.weights(SEVEN, quantisation="nf4").bytes == linear // 2 + linear // 64 + linear // 4096 + 2 * rest
    rows = 28 * (2 * 3584 + 2 * 512 + 2 * 18944 + 3584)
    assert c.weights(SEVEN, quantisation="int8").bytes == linear + 4 * rows + 2 * rest
    assert c.weights(SEVEN, head=False).bytes == 2 * (7_615_616_512 - 152064 * 3584)


def test_adapters_have_a_rank_for_each_side_of_every_linear_layer():
    assert c.adapter_parameters(THIRTY_TWO, 16) == 134_217_728  # as update_h200_fit.json counted
    assert c.adapter_parameters(SEVEN, 8, ["q_proj", "v_proj"]) == 28 * 8 * (2 * 3584 + 3584 + 512)


def test_state_and_gradients_for_a_parameter():
    assert c.moment_bytes("adamw_8bit") == 2.03125
    assert c.moments(1000, "adamw").bytes == 8000
    assert c.moments(1000, "sgd").bytes == 0
    assert c.master(1000).bytes == 4000
    assert c.gradients(1000, "weights").bytes == 2000
    assert c.gradients(1000, "float32", largest=10).bytes == 4020
    assert c.gradients(1000, "host", largest=10).bytes == 20
    assert c.staging(12, 10**9).bytes == 96 * MIB
    assert c.staging(12, 100).bytes == 2400


def test_the_kv_cache_has_a_page_more_for_each_slot_and_may_lie_in_the_gradients_memory():
    each = 64 * 2 * 8 * 128 * 2
    cache = c.kv_cache(THIRTY_TWO, slots=32, longest=1024, tokens=None)
    assert cache.bytes == 32 * 65 * 16 * each  # 8.12 GiB in update_h200_fit.json
    assert c.kv_cache(THIRTY_TWO, slots=32, longest=1024, tokens=100).bytes == 7 * 16 * each
    assert c.kv_cache(THIRTY_TWO, slots=32, longest=1024, tokens=None, lent=cache.bytes).bytes == 0
    assert c.kv_cache(THIRTY_TWO, slots=32, longest=1024, tokens=None, lent=cache.bytes - 1).bytes == cache.bytes


@pytest.mark.parametrize(
    ("slots", "samples", "n", "prompt", "response", "pages"),
    [
        (256, 256, 8, 128, 256, 32 * 8 + 256 * 17),  # each prompt once; each sample 16 pages and one
        (256, 512, 8, 128, 256, 33 * 8 + 256 * 17),  # the first and the last prompt may be there with some samples each
        (256, 256, 1, 128, 256, 256 * 25),
        (7, 100, 4, 320, 40, 3 * 20 + 7 * 4),  # 3 + 4 samples, or 1 + 4 + 2
        (8, 64, 2, 20, 10, 8 * 3),  # two pages of a sequence and one: no more than sharing would take
        (2, 16, 8, 4096, 16, 2 * 258),
        (1, 16, 8, 4096, 16, 257 + 1),
    ],
)
def test_the_cache_has_room_for_all_slots_at_full_length_and_each_prompt_once(
    slots, samples, n, prompt, response, pages
):
    assert cache_tokens(slots=slots, samples=samples, n=n, prompt=prompt, response=response) == 16 * pages


def test_what_a_layer_saves():
    token = Pass(tokens=1, positions=1)
    assert c.saved_by_layer(SEVEN, token) == 16 * 3584 + 4 * 3584 + 4 * 512 + 8 * 18944 + 4 * 28 + 8 == 225_400
    assert c.saved_by_layer(SEVEN, Pass(tokens=1, positions=1, compiled=True)) == 225_400 - 8 * 3584 - 4 * 18944
    assert c.saved_by_layer(SEVEN, Pass(tokens=1, positions=1, rank=16)) == 225_400 - 4 * 3584 + 14 * 16
    assert c.kept_by_recompute(SEVEN, token, matmuls=False) == 7168
    # With `matmuls`: inputs of two norms, queries, keys, values, attention's result and normalisers, gate and up.
    assert c.kept_by_recompute(SEVEN, token, matmuls=True) == 2 * 2 * 3584 + 4 * 3584 + 4 * 512 + 112 + 4 * 18944


def test_norms_of_queries_and_keys_are_saved_too():
    eight, token = find_shape("Qwen3-8B"), Pass(tokens=1, positions=1)
    plain = 16 * 4096 + 4 * 4096 + 4 * 1024 + 8 * 12288 + 4 * 32 + 8
    assert c.saved_by_layer(eight, token) == plain + 6 * (4096 + 1024)
    products = 4 * 4096 + 4 * 4096 + 4 * 1024 + 4 * 12288 + 4 * 32
    assert c.kept_by_recompute(eight, token, matmuls=True) == products + 2 * (4096 + 1024)


def test_activations_count_layers_kept_recomputed_and_away():
    a = Pass(tokens=1000, positions=1000)
    full = c.activations(SEVEN, a, recomputed=0, matmuls=False, leaving=0).bytes
    assert full == 28 * 1000 * 225_400
    assert c.activations(SEVEN, a, recomputed=0, matmuls=False, leaving=7).bytes == full * 3 // 4
    assert c.activations(SEVEN, a, recomputed=28, matmuls=False, leaving=0).bytes == 28 * 1000 * 7168
    assert c.activations(SEVEN, a, recomputed=14, matmuls=False, leaving=0).bytes == 14_000 * (7168 + 225_400)


def test_adapted_layers_keep_thin_results_too():
    plain, token = Pass(tokens=1, positions=1), Pass(tokens=1, positions=1, rank=16)
    kept = c.kept_by_recompute(SEVEN, plain, matmuls=True)
    assert c.kept_by_recompute(SEVEN, token, matmuls=True) == kept + 7 * 2 * 16
    assert c.kept_by_recompute(SEVEN, token, matmuls=False) == 7168


def test_keys_and_values_that_samples_share_are_kept_for_each_of_them():
    shared = Pass(tokens=1, positions=1, more_keys=10)
    assert c.saved_by_layer(SEVEN, shared) == 225_400 + 10 * 2 * 2 * 512
    eight = find_shape("Qwen3-8B")
    frozen = replace(eight, qk_norm=False)
    token = Pass(tokens=1, positions=1, rank=16)
    assert c.saved_by_layer(eight, token) - c.saved_by_layer(frozen, token) == 4 * (4096 + 1024)


def test_a_quantised_weight_is_wide_beside_less_of_the_mlp():
    few, many = Pass(tokens=100, positions=0, rank=8), Pass(tokens=20_000, positions=0, rank=8)
    weight, each = 3584 * 18944, 2 * 100 * 18944
    layer = c.forward_layer(SEVEN, few).bytes
    assert layer == 4 * each + 2 * 100 * 3 * 3584
    assert c.forward_layer(SEVEN, few, "nf4").bytes == layer - each + 2 * weight
    assert c.forward_layer(SEVEN, few, "int8").bytes == layer - 2 * each + 6 * weight
    assert c.forward_layer(SEVEN, many, "int8").bytes == c.forward_layer(SEVEN, many).bytes


def test_tied_tables_have_two_gradients_and_their_sum():
    tied = find_shape("Qwen2.5-0.5B")
    assert c.tables_gradient(tied, tied=True).bytes == 3 * c.waiting_table(tied).bytes == 6 * 151936 * 896
    assert c.tables_gradient(SEVEN, tied=False).bytes == 2 * 152064 * 3584


def test_the_head_needs_a_chunk_of_logits_and_the_gradient_of_its_weight():
    table, small, large = 152064 * 3584, Pass(tokens=10, positions=10), Pass(tokens=9000, positions=9000)
    beside = 4 * 3584 + 6 * 3584 + 4
    assert c.head_backward(SEVEN, small, trained=True).bytes == 6 * table + 10 * beside
    assert c.head_backward(SEVEN, large, trained=True).bytes == 3072 * 152064 * 4 + 4 * table + 9000 * beside
    assert c.head_backward(SEVEN, large, trained=False).bytes == 3072 * 152064 * 4 + 9000 * (beside - 2 * 3584)
    assert c.head_forward(SEVEN, small).bytes == 10 * 152064 * 4 + 2 * 3584 * 20


def test_a_mixture_of_experts_is_as_wide_as_a_token_meets_it():
    assert c.mlp_width(find_shape("Qwen3-30B-A3B")) == 8 * 768
    assert c.mlp_width(find_shape("DeepSeek-V3")) == 18432  # its first layers are dense, and wider than 9 x 2048
    assert c.mlp_width(SEVEN) == 18944


def test_layers_of_a_mixture_of_experts():
    """Qwen3-30B-A3B: 128 experts of 768, 8 for a token; what the terms are is in tests/run/test_sharded_trace.py."""
    shape, token = find_shape("Qwen3-30B-A3B"), Pass(tokens=1, positions=1)
    plain = 16 * 2048 + 4 * 4096 + 4 * 512 + 4 * 32 + 8 + 6 * (4096 + 512)
    assert c.saved_by_layer(shape, token) == plain + 8 * 8 * 768 + 8 * 4 * 2048 + 6 * 128 + 34 * 8
    forward = 2 * (4 * 8 * 768 + 3 * 2048 + 8 * 2048) + 4 * 128 + 8 * 8
    assert c.forward_layer(shape, token).bytes == forward
    experts = 2 * 128 * 2 * 768 * 2048  # their gradient, 805 MB at once
    few, many = Pass(tokens=1000, positions=0), Pass(tokens=40_000, positions=0)
    gone = 2 * 1000 * 8 * (2048 + 2 * 768)
    assert c.working_layer(shape, few, recomputed=False).bytes == experts - gone
    assert c.working_layer(shape, many, recomputed=False).bytes == 2 * 40_000 * (3 * 8 * 768 + 2 * 2048)
    frozen = Pass(tokens=1000, positions=0, rank=16)
    assert c.working_layer(shape, frozen, recomputed=False).bytes == 2 * 1000 * (3 * 8 * 768 + 2 * 2048)


def test_layers_with_latent_attention():
    """DeepSeek-V3: queries and keys of 128 heads x 192, values x 128; 512 and 1536 compressed numbers."""
    shape, token = find_shape("DeepSeek-V3"), Pass(tokens=1, positions=1)
    attention = 2 * (128 * 192 + 128 * 128) + 2 * (128 * 192 + 128 * 128) + 4 * 128
    latent = 8 * (512 + 1536) + 8 + 4 * 128 * 128
    experts = 6 * 256 + 8 * (4 * 7168 + 34)
    assert c.saved_by_layer(shape, token) == 16 * 7168 + attention + latent + 8 * 18432 + 8 + experts


@pytest.mark.parametrize(("kind", "width", "mib"), [("adamw_8bit", 2, 0), ("adamw", 4, 16), ("adamw_8bit", 4, 112)])
def test_a_step_copies_one_piece_where_no_kernel_does_it_all(kind, width, mib):
    assert c.step_transient(kind, width=width).bytes == mib * MIB


def test_a_term_explains_itself():
    assert c.master(1000).explained() == "4 B x P: the weights in float32  [P=1,000]"
    assert c.context().bytes < GIB


PRIME_RL = """prime-rl's benchmarks/results/BENCHMARKS.md of 2026-02-07. It differs from Ullage in what stays: float32
weights, gradients and AdamW, 16 bytes for a trained parameter, 4 for a frozen one, and a root group whose tied table is
gathered, has gradients, and is reduced in float32 (2 + 2 + 4). Layers run again; their inputs are offloaded or not. Its
reinforcement learning has a fused head, its supervised training whole logits: half precision, float32, log-softmax
and the gradients of both (2 + 4 + 4 + 4 + 4)."""


def stays_in_prime_rl(shape, rank):
    if rank:
        return 4 * shape.parameters + 16 * c.adapter_parameters(shape, rank) + 2 * shape.table
    return 16 * shape.parameters + 8 * shape.table


@pytest.mark.parametrize(
    ("name", "rank", "tokens", "away", "measured"),
    [
        ("Qwen3-0.6B", 0, 16384, False, 12.5),  # an H100, an A6000
        ("Qwen3-0.6B", 0, 65536, False, 19.6),  # 19.5 on an A6000
        ("Qwen3-0.6B", 0, 65536, True, 16.1),
        ("Qwen3-0.6B", 16, 16384, False, 5.1),  # an H100, an A6000
        ("Qwen3-0.6B", 16, 65536, False, 11.5),  # an H100, an A6000
        ("Qwen3-0.6B", 16, 65536, True, 7.9),
        ("Qwen3-4B", 16, 16384, False, 23.3),  # an H100, an A6000
        ("Qwen3-4B", 16, 16384, True, 20.6),
        ("Qwen3-4B", 16, 65536, False, 42.0),
        ("Qwen3-4B", 16, 65536, True, 31.1),
    ],
)
def test_rows_that_others_published_follow_from_their_settings(name, rank, tokens, away, measured):
    shape, a = find_shape(name), Pass(tokens=tokens, positions=tokens, rank=rank)
    inputs = c.activations(shape, a, recomputed=shape.layers, matmuls=False, leaving=shape.layers if away else 0).bytes
    total = stays_in_prime_rl(shape, rank) + inputs + c.working_layer(shape, a, recomputed=True).bytes
    assert total / GIB == pytest.approx(measured, rel=0.06 if rank else 0.05), PRIME_RL


@pytest.mark.parametrize(("tokens", "measured"), [(8192, 31.7), (8192, 31.2), (16384, 52.8)])
def test_their_supervised_rows_hold_every_logit_five_times(tokens, measured):
    shape, a = find_shape("Qwen3-0.6B"), Pass(tokens=tokens, positions=tokens)
    inputs = c.activations(shape, a, recomputed=shape.layers, matmuls=False, leaving=0).bytes
    total = 16 * shape.parameters + 2 * shape.table + inputs + 18 * tokens * shape.vocabulary
    assert total / GIB == pytest.approx(measured, rel=0.05), PRIME_RL


def test_layers_of_other_makes_keep_more():
    other, token = replace(SEVEN, gated=False), Pass(tokens=1, positions=1)
    assert c.saved_by_layer(other, token) == 225_400
    compiled = Pass(tokens=1, positions=1, compiled=True)
    assert c.saved_by_layer(other, compiled) == c.saved_by_layer(SEVEN, compiled) + 2 * 18944
    products = 2 * (3584 + 512 + 512 + 3584 + 18944 + 18944 + 3584)
    kept = 7168 + products + 2 * 3584 + 4 * 28
    assert c.kept_by_recompute(other, token, matmuls=True) == kept
    adapted = Pass(tokens=1, positions=1, rank=16)
    assert c.kept_by_recompute(other, adapted, matmuls=True) == kept + products + 7 * 2 * 16
