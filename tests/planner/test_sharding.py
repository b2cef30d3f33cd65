"""Sharded layouts by hand; their buffers against traces are in tests/run/test_sharded_trace.py."""

import pytest

from ullage.base.errors import UsageError
from ullage.config.load import load_mapping
from ullage.planner import components as c
from ullage.planner.components import GIB, Pass
from ullage.planner.hardware import parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout
from ullage.planner.sharding import Groups, Sharding, divides, exchanged, local_pass, local_shape, shardings

SEVEN = find_shape("Qwen2.5-7B")
LAYER = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944 + 2 * 3584 + 3584 + 2 * 512
TABLE = 152064 * 3584


def phases(shape, sharding, settings=None):
    made = Layout(shape, load_mapping({"algorithm.name": "grpo"} | (settings or {})).config, sharding=sharding)
    return {phase.name: phase for phase in made.phases()}


def test_without_sharding_every_rank_is_a_replica():
    config = load_mapping({"algorithm.name": "grpo"}).config
    replicas = Layout(SEVEN, config, ranks=8)
    assert replicas.sharding == Sharding(data=8)
    assert [phase.terms for phase in replicas.phases()] == [
        phase.terms for phase in Layout(SEVEN, config, sharding=Sharding(data=8)).phases()
    ]
    assert "every GPU holds a whole replica" in replicas.assumptions


def test_shards_divide_what_stays():
    whole, part = phases(SEVEN, Sharding(data=8)), phases(SEVEN, Sharding(data=8, shards=8))
    count = SEVEN.parameters
    for name, each in (("weights", 2), ("gradients", 2), ("optimizer", 8), ("master", 4)):
        assert whole["save"].components[name] == each * count
        assert part["save"].components[name] == each * count // 8
    assert phases(SEVEN, Sharding(data=8, shards=2))["save"].components["master"] == 4 * count // 2


def test_groups_of_their_own_by_hand():
    groups = Groups(
        shape=SEVEN, sharding=Sharding(data=8, shards=8), width=2, trained=SEVEN.layer_parameters, trains_tables=True
    )
    assert SEVEN.layer_parameters == LAYER
    assert (groups.layer, groups.table, groups.root) == (2 * LAYER, 2 * TABLE, 0)
    assert groups.forward_start().bytes == 4 * TABLE
    assert groups.forward_layer().bytes == 6 * LAYER
    assert groups.forward_head().bytes == 4 * TABLE + 2 * LAYER
    assert groups.backward_layer().bytes == (4 + 2 + 4) * LAYER
    assert groups.backward_head().bytes == 2 * TABLE + 2 * LAYER
    assert groups.backward_table().bytes == 6 * TABLE + TABLE // 2 + 2 * LAYER
    assert groups.backward_end().bytes == 0


def test_the_root_group_is_the_trap_at_scale():
    """Often forgotten: at 64 ranks 7B's state is 1.8 GiB a rank, its embedding and head 6 bytes x 1.09 B parameters."""
    options = {"shape": SEVEN, "width": 2, "trained": LAYER, "trains_tables": True}
    root = Groups(sharding=Sharding(data=64, shards=64, own_groups=False), **options)
    assert root.root == 4 * TABLE
    assert root.backward_end().bytes == 6 * 2 * TABLE > 3 * 16 * SEVEN.parameters / 64
    assert root.backward_layer().bytes == (4 + 2 + 4) * LAYER + 4 * TABLE + 2 * TABLE
    assert root.forward_start().bytes == 8 * TABLE + 4 * LAYER
    short = {"data.max_prompt_length": 64, "data.max_response_length": 64, "data.train_batch_size": 64}
    limit = short | {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 256}
    own = phases(SEVEN, Sharding(data=64, shards=64), limit)["update"]
    trap = phases(SEVEN, Sharding(data=64, shards=64, own_groups=False), limit)["update"]
    assert trap.components["gather"] == 12 * TABLE
    assert trap.total_bytes - own.total_bytes > 1.5 * 2**30


def test_adapters_reduce_little_and_gather_all():
    groups = Groups(shape=SEVEN, sharding=Sharding(data=8, shards=8), width=2, quantisation="nf4", trained=1_000_000)
    linear = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    packed = linear / 2 + linear / 64 + linear / 4096 + 2 * (LAYER - linear)
    assert groups.layer == pytest.approx(packed, abs=3584)
    assert groups.backward_layer().bytes == 2 * groups.layer + 6 * 1_000_000
    assert groups.backward_table().bytes == groups.backward_end().bytes == 0


def test_one_rank_of_tensor_parallelism_by_hand():
    """Matrices and the vocabulary divide; norms do not; one key-value head stays where there are fewer than ranks."""
    half = local_shape(SEVEN, 2)
    matrices = 28 * (2 * 3584 * 1792 + 2 * 3584 * 256 + 3 * 3584 * 9472) + 2 * 76032 * 3584
    vectors = 28 * (2 * 3584 + 1792 + 2 * 256) + 3584
    assert half.parameters == matrices + vectors
    assert half.kv_bytes_per_token == SEVEN.kv_bytes_per_token // 2
    assert [local_shape(SEVEN, tensor).kv_heads for tensor in (2, 4, 7, 28)] == [2, 1, 1, 1]
    a = Pass(tokens=1000, positions=1000)
    assert c.saved_by_layer(half, a) == 1000 * (16 * 3584 + 4 * 1792 + 4 * 256 + 8 * 9472 + 4 * 14 + 8)
    assert c.head_forward(half, a).bytes == 4 * 1000 * 76032 + 2 * 3584 * 2000
    assert [term.bytes for term in exchanged(half, a, Sharding(tensor=2))] == [2 * 1000 * 3584]


def test_latent_attention_and_routers_are_on_every_tensor_rank():
    shape = find_shape("DeepSeek-V3")
    local = local_shape(shape, 8)
    assert local.compressed_kv_bytes_per_token == shape.compressed_kv_bytes_per_token
    assert local.expert_mlp == 256
    router = 256 * 7168
    assert local.expert_parameters > router + 256 * 3 * 7168 * 256


def test_a_sequence_is_shared_and_keys_go_round():
    a = local_pass(Pass(tokens=1001, positions=500), 4)
    assert (a.tokens, a.positions) == (251, 125)
    assert [term.bytes for term in exchanged(SEVEN, a, Sharding(sequence=4))] == [2 * 2 * 251 * (512 + 512)]
    llama, long = find_shape("Llama-2-7B"), {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 65536}
    whole, quarter = phases(llama, Sharding(), long), phases(llama, Sharding(sequence=4), long)
    each = 32 * 2 * 4096 + 2 * 2 * 128  # inputs of layers, and embedded positions
    tokens = -(-whole["update"].components["activations"] // each // 4)
    assert quarter["update"].components["activations"] == each * tokens
    assert quarter["update"].components["gather"] == 2 * 2 * tokens * (4096 + 4096)


@pytest.mark.parametrize("given", [{"data": 8, "shards": 3}, {"data": 0}, {"data": 2, "tensor": 4, "shards": 4}])
def test_layouts_that_do_not_come_out_even_are_refused(given):
    with pytest.raises(UsageError, match="shards that divide"):
        Sharding(**given)


def test_every_layout_of_a_machine():
    found = shardings(parse_machine("h200 x2"))
    assert {(each.data, each.tensor, each.sequence, each.shards) for each in found} == {
        (2, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 2, 2),
    }  # fmt: skip
    large = shardings(parse_machine("8xH100", nodes=4))
    assert all(each.ranks == 32 and each.tensor * each.sequence <= 8 for each in large)
    assert Sharding(data=32, shards=32) in large


def test_heads_must_divide():
    assert divides(SEVEN, Sharding(tensor=4))
    assert not divides(SEVEN, Sharding(tensor=8))  # 28 heads


def test_a_sharded_plan_says_that_it_is_one():
    made = Layout(SEVEN, load_mapping({"algorithm.name": "grpo"}).config, sharding=Sharding(data=4, tensor=2, shards=4))
    assert made.ranks == 8
    told = [text for text in made.assumptions if "does not shard yet" in text]
    assert told
    assert "data 4, tensor 2, shards 4" in told[0]
    assert not any("whole replica" in text for text in made.assumptions)


def test_logits_are_drawn_from_whole():
    one, two = phases(SEVEN, Sharding(), SHORT_PROMPT), phases(SEVEN, Sharding(tensor=2), SHORT_PROMPT)
    assert one["rollout"].components["head"] == two["rollout"].components["head"] == 4 * 64 * 152064


SHORT_PROMPT = {"data.max_prompt_length": 8}


@pytest.mark.parametrize(
    ("name", "rank", "tokens", "world", "measured"),
    [
        ("Qwen3-0.6B", 0, 65536, 4, 12.4),
        ("Qwen3-4B", 0, 16384, 8, 17.1),
        ("Qwen3-4B", 0, 65536, 8, 36.1),
        ("Qwen3-4B", 16, 16384, 8, 10.3),
        ("Qwen3-4B", 16, 65536, 8, 28.8),
        ("Qwen3-30B-A3B", 0, 16384, 8, 74.6),
    ],
)
def test_rows_that_others_measured_on_several_gpus_follow_from_their_settings(name, rank, tokens, world, measured):
    """prime-rl's benchmarks/results/BENCHMARKS.md of 2026-02-07, GiB a GPU: FSDP2, 16 bytes for a trained parameter and
    4 for a frozen one, tied tables in the root group, layers run again. Mixtures with longer sequences or adapters need
    more there: their experts are of another make than those of transformers, which Ullage runs."""
    shape, a = find_shape(name), Pass(tokens=tokens, positions=tokens, rank=rank)
    trained = c.adapter_parameters(shape, rank) if rank else shape.parameters
    groups = Groups(
        shape=shape,
        sharding=Sharding(data=world, shards=world, own_groups=False),
        width=2,
        trained=trained // shape.layers if rank else shape.layer_parameters,
        trains_tables=not rank,
    )
    stays = (4 * shape.parameters * bool(rank) + 16 * trained) / world
    inputs = c.activations(shape, a, recomputed=shape.layers, matmuls=False, leaving=0).bytes
    waiting = 2 * shape.table if shape.tied and not rank else 0
    layer = c.working_layer(shape, a, recomputed=True).bytes + groups.backward_layer().bytes + waiting
    assert (stays + inputs + layer) / GIB == pytest.approx(measured, rel=0.11)
