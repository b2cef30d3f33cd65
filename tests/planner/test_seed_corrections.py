"""Numbers that are often quoted wrongly, and what is true: each is a question to the planner."""

import pytest

from ullage.config.load import load_mapping
from ullage.planner import components as c
from ullage.planner.components import GIB, Pass
from ullage.planner.engines import Engine, engine_share
from ullage.planner.hardware import find_gpu, instances, parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout
from ullage.planner.plan import plan
from ullage.planner.sharding import Groups, Sharding

GB = 1e9
LLAMA = find_shape("Llama-2-7B")
ONE_SEQUENCE = {
    "algorithm.name": "reinforce_plus_plus",
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 2048,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.kv_cache_tokens": 16,
}


def allocated(settings):
    layout = Layout(LLAMA, load_mapping(ONE_SEQUENCE | settings).config)
    return {phase.name: phase.allocated_bytes / GB for phase in layout.phases()}


def test_a_peak_is_a_maximum_over_phases_never_a_sum():
    """Row 1. All in bf16, the first step: recomputation on or off, 54.5 GB, for the optimizer's step binds."""
    count, a = LLAMA.parameters, Pass(tokens=2048, positions=2048)
    for recomputed in (0, 32):
        kept = c.activations(LLAMA, a, recomputed=recomputed, matmuls=False, leaving=0).bytes
        layer = c.working_layer(LLAMA, a, recomputed=recomputed > 0).bytes
        passing = 4 * count + kept + max(layer, 12 * 2048 * 32000)
        assert passing < 0.8 * 8 * count
        assert max(passing, 8 * count) / GB == pytest.approx(54.5, rel=0.02)
    phases = Layout(LLAMA, load_mapping(ONE_SEQUENCE).config).phases()
    assert sum(phase.total_bytes for phase in phases) > 5 * max(phase.total_bytes for phase in phases)


def test_three_recipes_of_full_fine_tuning_are_three_numbers():
    """54.5 GB all in bf16, 84 with float32 moments, 108.9 with a float32 master; never one number."""
    count = LLAMA.parameters
    weights, grads = c.weights(LLAMA).bytes, c.gradients(count, "weights").bytes
    assert (weights + grads + 4 * count) / GB == pytest.approx(54.5, rel=0.02)
    assert (weights + grads + c.moments(count, "adamw").bytes) / GB == pytest.approx(84, rel=0.05)
    state = c.moments(count, "adamw").bytes + c.master(count).bytes
    assert state == 12 * count
    assert (weights + grads + state) / GB == pytest.approx(108.9, rel=0.02)
    assert allocated({"memory.recompute": "full"})["optimizer_step"] == pytest.approx(108.9, rel=0.02)


def test_lora_with_and_without_recomputation():
    """26.4 and 15.5 GB were measured (with whole logits, 0.8 GB); 20 is often quoted for the first."""
    lora = {"actor_rollout_ref.model.lora_rank": 16}
    assert max(allocated(lora | {"memory.recompute": "none"}).values()) == pytest.approx(26.4, rel=0.03)
    assert max(allocated(lora | {"memory.recompute": "full"}).values()) == pytest.approx(15.5, rel=0.03)


def test_lora_of_7b_in_12_gb_is_impossible_its_weights_alone_are_larger():
    assert c.weights(LLAMA).bytes / GB == pytest.approx(13.5, abs=0.05)
    assert min(allocated({"actor_rollout_ref.model.lora_rank": 16}).values()) > 13.4
    assert allocated({"actor_rollout_ref.model.lora_rank": 16})["rollout"] == pytest.approx(14.2, abs=0.1)


def test_13b_lora_in_26_gb_is_its_weights_and_nothing_else():
    assert c.weights(find_shape("Llama-2-13B")).bytes / GB == pytest.approx(26, abs=0.05)


def test_70b_lora_does_not_fit_80_gb_its_weights_are_140():
    shape, machine = find_shape("Llama-3.1-70B"), parse_machine("H100")
    assert c.weights(shape).bytes / GB == pytest.approx(141, abs=0.2)
    lora = {"algorithm.name": "grpo", "actor_rollout_ref.model.lora_rank": 16}
    assert plan(shape, load_mapping(lora).config, machine).fits is False
    assert c.weights(shape, quantisation="nf4").bytes / GB < 40


def test_8_bit_adam_is_two_bytes_and_scales_not_one():
    assert c.moments(10**6, "adamw_8bit").bytes == 2_031_250


def test_activations_are_31_times_the_residual_stream():
    shape, token = find_shape("Qwen2.5-7B"), Pass(tokens=1, positions=1)
    assert c.kept_by_recompute(shape, token, matmuls=False) == 2 * shape.hidden == 7168
    assert c.saved_by_layer(shape, token) / 7168 == pytest.approx(31, abs=0.5)


def test_logits_of_16k_tokens_are_5_to_30_gb_and_never_all_there():
    whole = 16384 * 152064
    assert (2 * whole / GB, 12 * whole / GB) == (pytest.approx(5, abs=0.1), pytest.approx(30, abs=0.2))
    shape = find_shape("Qwen2.5-7B")
    here = c.head_forward(shape, Pass(tokens=16384, positions=16384)).bytes
    assert here == 4 * 3072 * 152064 + 2 * 3584 * 2 * 16384
    assert here / GB < 2.2


@pytest.mark.parametrize(("name", "times"), [("Llama-3.1-8B", 4), ("Qwen2.5-0.5B", 7), ("Llama-3.1-70B", 8)])
def test_the_kv_cache_has_key_value_heads_not_the_hidden_size(name, times):
    shape = find_shape(name)
    assert 2 * 2 * shape.layers * shape.hidden == times * shape.kv_bytes_per_token


def test_eight_sequences_of_2048_cost_8_6_gb_at_7b():
    assert 8 * 2048 * LLAMA.kv_bytes_per_token / GB == pytest.approx(8.6, abs=0.05)


def test_the_kv_cache_is_no_cost_of_training_where_gradients_lend_their_memory():
    layout = Layout(find_shape("Qwen2.5-7B"), load_mapping({"algorithm.name": "grpo"}).config)
    assert layout.kv_cache().bytes == 0
    assert all("kv_cache" not in phase.components for phase in layout.phases())


def test_recomputation_saves_a_share_of_activations_and_another_of_the_peak():
    """Often quoted: 50 to 75 %. Of the activations it is more; of the peak it depends on what else is there."""
    shape, a = find_shape("Qwen2.5-7B"), Pass(tokens=8192, positions=8192)
    none = c.activations(shape, a, recomputed=0, matmuls=False, leaving=0).bytes
    full = c.activations(shape, a, recomputed=28, matmuls=False, leaving=0).bytes
    assert 1 - full / none == pytest.approx(0.968, abs=0.001)
    peaks = [max(allocated({"memory.recompute": recompute}).values()) for recompute in ("none", "full")]
    assert 1 - peaks[1] / peaks[0] == pytest.approx(0.097, abs=0.005)


def test_offload_saves_a_share_of_activations_and_another_of_the_peak():
    """Row "activation offload 60-80 %": of the activations what leaves, all layers but one; of the peak 0 to most."""
    shape, a = find_shape("Qwen2.5-7B"), Pass(tokens=8192, positions=8192)
    here = c.activations(shape, a, recomputed=0, matmuls=False, leaving=0).bytes
    left = c.activations(shape, a, recomputed=0, matmuls=False, leaving=27).bytes
    assert 1 - left / here == pytest.approx(27 / 28, abs=1e-6)

    def saved(settings):
        settings = {"algorithm.name": "grpo", "memory.recompute": "none"} | settings
        peaks = []
        for offload in ("none", "async"):
            config = load_mapping(settings | {"memory.activation_offload": offload}).config
            peaks.append(max(phase.total_bytes for phase in Layout(shape, config).phases()))
        return 1 - peaks[1] / peaks[0]

    lora = {"actor_rollout_ref.model.lora_rank": 16}
    assert saved({"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1024}) < 0.05
    assert saved({"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192}) == pytest.approx(0.25, abs=0.05)
    assert saved(lora | {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192}) > 0.6


def test_grpo_with_adapters_on_7b_is_16_gb_and_its_cache_1_6_not_45():
    """Row "GRPO/GSPO LoRA 7B: ~45 GB": rank 16, layers run again, four sequences of 512 + 256 tokens in one pass; 16.3
    were measured with float32 logits of all of them, 0.4 GB."""
    a, trained = Pass(tokens=4 * 768, positions=4 * 256, rank=16), c.adapter_parameters(LLAMA, 16)
    stays = c.weights(LLAMA).bytes + 16 * trained
    kept = c.activations(LLAMA, a, recomputed=32, matmuls=False, leaving=0).bytes
    layer = c.working_layer(LLAMA, a, recomputed=True).bytes + 4 * 4 * 768 * 32000
    assert (stays + kept + layer) / GB == pytest.approx(16.3, rel=0.03)
    assert 4 * 768 * LLAMA.kv_bytes_per_token / GB == pytest.approx(1.6, abs=0.02)


def test_communication_buffers_are_a_few_layers_not_a_model():
    """Row "params x size x sharding_factor": gathered and prefetched layers, their reduce-scatter, and NCCL."""
    shape = find_shape("Llama-3.1-70B")
    groups = Groups(
        shape=shape, sharding=Sharding(data=64, shards=64), width=2, trained=shape.layer_parameters, trains_tables=True
    )
    assert groups.backward_layer().bytes == 10 * shape.layer_parameters
    assert groups.backward_layer().bytes / GB == pytest.approx(8.6, abs=0.1)
    assert groups.backward_layer().bytes < 2 * shape.parameters / 16
    assert c.buffers(backward=True, ranks=64).bytes - c.buffers(backward=True, ranks=1).bytes == c.NCCL


def test_sharding_against_tensor_parallelism_is_no_constant():
    """Row "FSDP uses 20-30 % less than tensor parallel": less or more, by shape, length and what is trained."""

    def ratio(name, settings):
        config = load_mapping({"algorithm.name": "grpo"} | settings).config
        layouts = (Sharding(data=8, shards=8), Sharding(tensor=8))
        made = [Layout(find_shape(name), config, sharding=sharding) for sharding in layouts]
        sharded, tensor = (max(phase.total_bytes for phase in layout.phases()) for layout in made)
        return sharded / tensor

    long = {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 32768, "memory.recompute": "none"}
    assert ratio("Llama-3.1-8B", long) > 2
    assert 1 < ratio("Llama-3.1-70B", {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1024}) < 1.3
    few = {"data.train_batch_size": 8, "actor_rollout_ref.rollout.n": 2, "data.max_response_length": 2048}
    assert ratio("Llama-3.1-8B", long | few) < 0.9


def test_mini_batches_count_prompts():
    """Row `ppo_mini_batch_size`: prompts over all ranks, times n samples; a pass holds a rank's part at most."""
    settings = {
        "algorithm.name": "grpo",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 10**6,
    }
    made = Layout(find_shape("Qwen2.5-0.5B"), load_mapping(settings).config, ranks=8)
    assert made.update_pass.positions == 16 * 4 // 8 * 512
    assert made.update_pass.tokens == 2 * 512 + 8 * 511  # a prompt is fed once for its samples


def test_a_fraction_of_the_gpu_means_something_else_to_every_engine():
    """Row vLLM `gpu_memory_utilization`: of all memory; SGLang's of what is free, here half of it."""
    shape, options = find_shape("Qwen2.5-7B"), {"capacity": 80 * GIB, "trainer_bytes": 40 * GIB}
    vllm, sglang = (engine_share(shape, Engine(kind=kind, fraction=0.5), **options) for kind in ("vllm", "sglang"))
    assert sum(term.bytes for term in vllm.awake) / GIB == pytest.approx(40, abs=0.01)
    held = sum(term.bytes for term in sglang.awake if term.name in ("weights", "kv_cache"))
    assert held / GIB == pytest.approx((40 - 783 / 1024) / 2, abs=0.01)
    assert vllm.kv_tokens > 4 * sglang.kv_tokens


def test_tensor_core_rates_are_dense_bf16():
    assert find_gpu("A100").tflops_bf16 == 312
    assert find_gpu("H100").tflops_bf16 == pytest.approx(989, abs=1)
    assert find_gpu("RTX 4090").tflops_bf16 == pytest.approx(165, abs=1)


def test_24_gb_is_not_24_gib():
    assert int(24e9 / 2**20) == 22_888
    assert find_gpu("A10G").memory_bytes < 24e9 < 24 * 2**30


def test_prices_are_dated():
    found = [
        offer for offer in instances() if offer.name == "gpu_1x_a100" and offer.provider.lower().startswith("lambda")
    ]
    assert [offer.price for offer in found] == [1.99]
    assert all(offer.date for offer in found)


def test_gae_has_verls_defaults_and_takes_the_other_ones():
    config = load_mapping({"algorithm.name": "ppo"}).config
    assert (config.algorithm.gamma, config.algorithm.lam) == (1.0, 1.0)
    config = load_mapping({"algorithm.name": "ppo", "algorithm.gamma": 0.99, "algorithm.lam": 0.95}).config
    assert (config.algorithm.gamma, config.algorithm.lam) == (0.99, 0.95)
