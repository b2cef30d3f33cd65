"""Host memory by what holds it, the pinned and shared part of it, and disk: all by hand."""

from ullage.config.load import load_mapping
from ullage.planner import components as c
from ullage.planner.components import MIB
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout
from ullage.planner.sharding import Sharding
from ullage.planner.storage import METRICS, NCCL_SEGMENT, REWARD_WORKER

SHAPE = find_shape("Qwen2.5-0.5B")
COUNT = 494_032_768


def layout(settings, **options):
    return Layout(SHAPE, load_mapping({"algorithm.name": "grpo"} | settings).config, **options)


def test_loading_passes_through_host_memory_where_saving_needs_less():
    lora = layout({"actor_rollout_ref.model.lora_rank": 16}).host()
    adapters = c.adapter_parameters(SHAPE, 16)
    assert lora["checkpoint"] == 12 * adapters
    assert lora["load"] + lora["checkpoint"] == 2 * COUNT
    judged = {
        "actor_rollout_ref.model.lora_rank": 16,
        "reward_model.enable": True,
        "reward_model.model.path": "Qwen2.5-7B",
    }
    assert layout(judged).host()["load"] + lora["checkpoint"] == 2 * 7_615_616_512  # the largest model of all roles
    assert layout({}).host()["load"] == 0  # 12 bytes of state a parameter are more than 2


def test_state_that_is_streamed_is_pinned_and_state_that_the_cpu_steps_is_not():
    streamed = layout({"memory.optimizer_state": "streamed", "memory.gradients": "host"})
    assert streamed.pinned() == {
        "gradients": 2 * (COUNT + 4 * c.PIECE),
        "activations": 0,
        "roles": 0,
        "optimizer": 12 * COUNT,
    }
    assert "optimizer" not in layout({"memory.optimizer_state": "host"}).pinned()


def test_parked_roles_and_offloaded_activations_are_pinned():
    settings = {
        "memory.offload_roles": True,
        "memory.activation_offload": "async",
        "actor_rollout_ref.actor.use_kl_loss": True,
    }
    made = layout(settings)
    assert made.pinned()["roles"] == 2 * COUNT
    inputs = 23 * 2 * 896 * made.update_pass.tokens  # every layer's input but the last one's
    assert made.pinned()["activations"] == -(-inputs // (64 * MIB)) * 64 * MIB


def test_reward_workers_are_processes_of_their_own():
    assert layout({}).host()["reward_workers"] == 0
    scored = {"reward.functions": [{"name": "gsm8k"}], "reward.num_workers": 3}
    assert layout(scored).host()["reward_workers"] == 3 * REWARD_WORKER
    assert layout({"reward.functions": [{"name": "gsm8k"}]}).host()["reward_workers"] == 4 * REWARD_WORKER


def test_only_nccl_puts_something_into_shared_memory():
    assert layout({}).host()["shared"] == 0
    assert layout({}, ranks=8).host()["shared"] == 2 * NCCL_SEGMENT


def test_shards_keep_their_part_on_the_host_and_a_checkpoint_is_whole():
    whole, part = layout({"memory.optimizer_state": "streamed"}), Sharding(data=8, shards=8)
    shared = layout({"memory.optimizer_state": "streamed"}, sharding=part)
    assert shared.host()["optimizer"] == 12 * COUNT // 8 == whole.host()["optimizer"] // 8
    assert shared.disk() == whole.disk()


def test_logs_are_small_beside_checkpoints():
    disk = layout({"trainer.log_samples": 10}).disk()
    assert disk["logs_of_1000_steps"] == 1000 * (4 * 1024 * 10 + METRICS)
    assert disk["final"] == 2 * COUNT
    assert disk["logs_of_1000_steps"] < disk["checkpoint"] / 50
