"""Other people's formulas give what they give."""

from ullage.bench.memory_draws import Draw
from ullage.bench.rivals import accelerate, methodology

BASE = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 100,
    "data.max_response_length": 28,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.max_num_seqs": 8,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1000,
    "memory.recompute": "none",
}
SEVEN = 7_615_616_512
"""Parameters of Qwen2.5-7B; its embedding has 152064 x 3584, its output head as many."""
TABLE = 152064 * 3584


def layout(model, **settings):
    return Draw(0, model, BASE | settings).layout


def test_accelerate_counts_the_optimizer_of_a_model_without_its_head():
    assert accelerate(layout("7B")) == 8 * (SEVEN - TABLE)


def test_accelerate_knows_only_weights_of_adapter_runs():
    lora = {"actor_rollout_ref.model.lora_rank": 8}
    assert accelerate(layout("7B", **lora)) == 2 * (SEVEN - TABLE)
    assert accelerate(layout("7B", **lora | {"actor_rollout_ref.model.quantization": "nf4"})) == (SEVEN - TABLE) // 2


def test_accelerates_rule_is_its_own():
    from accelerate.commands.estimate import estimate_training_usage

    size = 4 * (SEVEN - TABLE)
    assert accelerate(layout("7B")) == max(estimate_training_usage(size, "float16").values())


def test_the_guides_sum_by_hand():
    activations = 1000 * 3584 * 28 * 2
    cache = 8 * 128 * 28 * 3584 * 4
    assert methodology(layout("7B")) == 8 * SEVEN + activations + cache
    checkpointed = layout("7B", **{"memory.recompute": "full"})
    assert methodology(checkpointed) == 8 * SEVEN + activations // 4 + cache
    offloaded = layout("7B", **{"memory.recompute": 0.5, "memory.activation_offload": "async"})
    assert methodology(offloaded) == 8 * SEVEN + round(0.5 * 0.3 * activations) + cache
    eight_bit = layout("7B", **{"actor_rollout_ref.actor.optim.optimizer": "adamw_8bit"})
    assert methodology(eight_bit) == 5 * SEVEN + activations + cache


def test_the_guides_sum_of_adapters():
    # tiny: hidden 64, MLP 128, 2 layers, keys of 32: rank 8 adapters on all seven linear layers of both.
    adapters = 8 * 2 * (128 + 96 + 96 + 128 + 3 * 192)
    held = layout("tiny", **{"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.quantization": "int8"})
    want = held.shape.parameters + 6 * adapters + 1000 * 64 * 2 * 2 + 8 * 128 * 2 * 64 * 4
    assert methodology(held) == want
