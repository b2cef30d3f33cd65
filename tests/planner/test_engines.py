"""Engines that share a GPU with the trainer: by hand, on 80 GiB."""

import pytest

from ullage.base.errors import UsageError
from ullage.planner import components as c
from ullage.planner.components import GIB, MIB
from ullage.planner.engines import Engine, engine_share, fraction_for
from ullage.planner.model_shape import find_shape

SEVEN = find_shape("Qwen2.5-7B")
WEIGHTS = 2 * 7_615_616_512
PASS = 2 * 8192 * (3 * 18944 + 2 * 3584)
CONTEXT = 783 * MIB
TOKEN = 28 * 2 * 4 * 128 * 2
CAPACITY, TRAINER = 80 * GIB, 20 * GIB


def share(kind, fraction, **options):
    trainer = options.pop("trainer", TRAINER)
    return engine_share(
        SEVEN, Engine(kind=kind, fraction=fraction, **options), capacity=CAPACITY, trainer_bytes=trainer
    )


def whole_pages(count):
    return count // (16 * TOKEN) * 16


def test_vllms_fraction_is_of_the_total_for_all_that_it_holds():
    found = share("vllm", 0.5)
    assert found.kv_tokens == whole_pages(40 * GIB - WEIGHTS - PASS - CONTEXT) == 450_752
    assert sum(term.bytes for term in found.awake) == pytest.approx(40 * GIB, abs=16 * TOKEN)
    assert found.kv_tokens == share("vllm", 0.5, trainer=0).kv_tokens
    assert found.problem == ""


def test_vllm_does_not_start_where_its_part_is_not_free():
    found = share("vllm", 0.8)
    assert found.problem == "gpu_memory_utilization = 0.8 asks for 64.0 GiB that are free, of 60.0 GiB"


def test_sglangs_fraction_is_of_what_is_free_for_weights_and_cache():
    found = share("sglang", 0.5)
    assert found.kv_tokens == whole_pages((60 * GIB - CONTEXT) // 2 - WEIGHTS)
    assert found.kv_tokens < share("vllm", 0.5).kv_tokens
    assert share("sglang", 0.5, trainer=0).kv_tokens > found.kv_tokens
    assert "leaves" in share("sglang", 0.99).problem


def test_tgis_fraction_is_of_the_total_and_the_trainer_counts_too():
    found = share("tgi", 1.0)
    assert found.kv_tokens == whole_pages(int(0.95 * CAPACITY) - TRAINER - WEIGHTS - PASS - CONTEXT)
    assert share("tgi", 0.5).problem == ""
    assert share("tgi", 0.3).problem.startswith("cuda_memory_fraction = 0.3 is ")


def test_what_stays_asleep():
    names = [[term.name for term in share("vllm", 0.5, sleep=level).asleep] for level in (0, 1, 2)]
    assert names == [["weights", "context", "working_layer", "kv_cache"], ["context"], ["context"]]
    assert [share("vllm", 0.5, sleep=level).host_bytes for level in (0, 1, 2)] == [0, WEIGHTS, 0]
    residue = share("vllm", 0.5, sleep=2, tensor=2, graphs_bytes=GIB).asleep
    assert sum(term.bytes for term in residue) == CONTEXT + GIB + 650 * MIB


def test_tensor_parallel_engines_have_part_of_weights_and_heads():
    found = share("vllm", 0.5, tensor=4)
    weights = next(term for term in found.awake if term.name == "weights")
    assert weights.bytes == pytest.approx(WEIGHTS / 4, rel=0.001)
    held = sum(term.bytes for term in found.awake if term.name != "kv_cache")
    assert found.kv_tokens == (40 * GIB - held) // (4 * TOKEN) * 16
    eight = share("vllm", 0.5, tensor=28)
    cache = next(term for term in eight.awake if term.name == "kv_cache")
    assert cache.bytes == eight.kv_tokens * TOKEN // 4  # a key-value head cannot be divided


def test_weights_arrive_in_buckets_and_a_larger_tensor_alone():
    assert [term.bytes for term in share("vllm", 0.5).sync] == [2 * 152064 * 3584]
    small = engine_share(
        find_shape("Llama-2-7B"), Engine(kind="vllm", fraction=0.5), capacity=CAPACITY, trainer_bytes=0
    )
    assert [term.bytes for term in small.sync] == [512 * MIB]


def test_sequences_that_a_cache_holds_and_compressed_keys():
    found = share("vllm", 0.5)
    assert found.sequences(1000) == 450_752 // 1008
    lite = engine_share(
        find_shape("DeepSeek-V2-Lite"), Engine(kind="vllm", fraction=0.9), capacity=CAPACITY, trainer_bytes=0
    )
    cache = next(term for term in lite.awake if term.name == "kv_cache")
    assert cache.bytes == lite.kv_tokens * 27 * 576 * 2


@pytest.mark.parametrize("kind", ["vllm", "sglang", "tgi"])
def test_a_fraction_is_translated_through_the_tokens_it_leaves(kind):
    """Often quoted as one number: the same cache is 0.38 of one engine and 0.43 of another."""
    engine = Engine(kind=kind, fraction=0.5)
    options = {"capacity": CAPACITY, "trainer_bytes": TRAINER}
    fraction = fraction_for(SEVEN, engine, kv_tokens=200_000, **options)
    assert engine_share(SEVEN, Engine(kind=kind, fraction=fraction + 1e-9), **options).kv_tokens == 200_000
    expected = {
        "vllm": (200_000 * TOKEN + WEIGHTS + PASS + CONTEXT) / CAPACITY,
        "sglang": (200_000 * TOKEN + WEIGHTS) / (60 * GIB - CONTEXT),
        "tgi": (200_000 * TOKEN + WEIGHTS + PASS + CONTEXT + TRAINER) / CAPACITY / 0.95,
    }
    assert fraction == pytest.approx(expected[kind])


def test_every_number_explains_itself():
    cache = share("sglang", 0.5).awake[-1]
    assert cache.explained().startswith("fraction x (free - context) - weights  [fraction=0.5, base=")
    assert c.NCCL == 650 * MIB


def test_a_fraction_is_one():
    with pytest.raises(UsageError, match=r"gpu_memory_utilization = 1\.2"):
        Engine(kind="vllm", fraction=1.2)
