"""Flat config classes: the documents' fields and defaults, and the tree they stand for."""

import dataclasses
import inspect

import pytest

from ullage import AgentConfig, GSPOConfig, RolloutConfig, Trainer, TrainingConfig
from ullage.base.errors import ConfigError
from ullage.compat.given import read
from ullage.config.check import require_runnable

# Document 002, "Training Configuration" and "Rollout Configuration".
TRAINING = {
    "model_dtype": "bfloat16", "total_epochs": 1, "train_batch_size": 1024, "learning_rate": 1e-6, "ppo_epochs": 1,
    "ppo_mini_batch_size": 256, "clip_epsilon": 0.2, "kl_coef": 0.001, "enable_gradient_checkpointing": True,
    "enable_activation_offload": True, "fsdp_config": {}, "data_parallel_size": 1, "tensor_parallel_size": 1,
}  # fmt: skip
ROLLOUT = {
    "name": "vllm", "tensor_model_parallel_size": 1, "gpu_memory_utilization": 0.9, "max_num_seqs": 128, "n": 1,
    "temperature": 0.7, "top_p": 0.9, "enable_chunked_prefill": True, "cudagraph_capture_sizes": [1, 2, 4, 8],
}  # fmt: skip


def test_fields_and_defaults_are_the_documents():
    given = dataclasses.asdict(TrainingConfig(model_path="m"))
    assert {name: given[name] for name in TRAINING} == TRAINING
    assert next(iter(inspect.signature(TrainingConfig).parameters)) == "model_path"
    assert dataclasses.asdict(RolloutConfig()) == ROLLOUT


def test_training_config_builds_the_tree():
    tree = TrainingConfig("m", train_batch_size=100, learning_rate=3e-6, clip_epsilon=0.1, kl_coef=0.01).to_config()
    actor = tree.actor_rollout_ref.actor
    assert tree.actor_rollout_ref.model.path == "m"
    assert (tree.actor_rollout_ref.model.dtype, tree.memory.recompute) == ("auto", "full")
    assert (tree.data.train_batch_size, actor.ppo_mini_batch_size) == (100, 100)
    assert (actor.optim.lr, actor.clip_ratio, actor.kl_loss_coef, actor.use_kl_loss) == (3e-6, 0.1, 0.01, True)
    assert TrainingConfig("m", kl_coef=0).to_config().actor_rollout_ref.actor.use_kl_loss is False
    assert TrainingConfig("m", model_dtype="float32").to_config().actor_rollout_ref.model.dtype == "float32"


def test_grpo_training_of_document_004():
    # For 7B model on single 80GB A100
    config = TrainingConfig(
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        num_generations=4,
        max_completion_length=256,
        use_lora=True,
        lora_r=16,
        gradient_checkpointing=True,
        bf16=True,
    )
    tree = config.to_config()
    assert (tree.data.train_batch_size, tree.data.max_response_length) == (4, 256)
    assert tree.actor_rollout_ref.rollout.n == 4
    assert tree.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 1
    assert (tree.actor_rollout_ref.model.lora_rank, tree.actor_rollout_ref.model.lora_alpha) == (16, 32)


def test_gspo_training_of_document_004():
    # For 7B model on single 80GB A100
    config = GSPOConfig(
        per_device_train_batch_size=1,
        num_generations=4,
        max_completion_length=256,
        use_lora=True,
        gradient_checkpointing=True,
    )
    tree = config.to_config()
    assert (tree.algorithm.name, tree.data.train_batch_size, tree.actor_rollout_ref.model.lora_rank) == ("gspo", 1, 16)


def test_strategies_of_document_004():
    config = TrainingConfig(
        use_lora=True,
        lora_r=16,          # Rank (8-64 typical)
        lora_alpha=32,      # Scaling factor
        lora_dropout=0.05,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.lora.dropout = 0.05: other settings of adapters"):
        require_runnable(config.to_config())

    config = TrainingConfig(
        gradient_checkpointing=True,
    )
    assert config.to_config().memory.recompute == "full"
    off = TrainingConfig(gradient_checkpointing=False).to_config()
    assert off.memory.recompute == "none"

    config = TrainingConfig(
        bf16=True,  # Recommended for Ampere+ GPUs
        # OR
        fp16=True,  # For older GPUs
    )
    assert config.to_config().actor_rollout_ref.model.dtype == "auto"
    with pytest.raises(ConfigError, match="fp16 = true"):
        TrainingConfig(fp16=True).to_config()

    # 8-bit (good quality, ~50% memory reduction)
    config = AgentConfig(use_8bit=True)
    assert TrainingConfig(use_lora=True).to_config(config).actor_rollout_ref.model.quantization == "int8"
    # 4-bit (aggressive, ~75% memory reduction)
    config = AgentConfig(use_4bit=True)
    assert TrainingConfig(use_lora=True).to_config(config).actor_rollout_ref.model.quantization == "nf4"
    with pytest.raises(ConfigError, match="only weights that are not trained can be quantised"):
        config.to_config()
    with pytest.raises(ConfigError, match="use_8bit = true, use_4bit = true"):
        AgentConfig(use_8bit=True, use_4bit=True).overrides()

    config = TrainingConfig(
        per_device_train_batch_size=1,
        gradient_accumulation_steps=16,
    )
    assert config.to_config().data.train_batch_size == 16  # Effective batch size = 16

    # Use memory-efficient attention
    config = AgentConfig(attn_implementation="flash_attention_2")
    assert config.to_config() == AgentConfig().to_config()


def test_maximum_memory_efficiency_of_document_004():
    # Maximum memory efficiency for 7B model on 24GB GPU
    config = TrainingConfig(
        use_lora=True,
        lora_r=8,
        gradient_checkpointing=True,
        bf16=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_completion_length=128,
    )
    tree = config.to_config()
    assert (tree.actor_rollout_ref.model.lora_rank, tree.data.train_batch_size) == (8, 8)


def test_what_has_no_effect_is_said(caplog):
    config = TrainingConfig("m", fsdp_config={"param_offload": True}, tensor_parallel_size=2)
    tree = read(config).config
    assert tree == TrainingConfig("m").to_config()
    said = " ".join(caplog.messages)
    for name in ("enable_activation_offload", "fsdp_config.param_offload", "tensor_model_parallel_size"):
        assert name in said


def test_several_flat_configs_and_sections_are_one_config(task_files, tiny_model, tmp_path):
    training = TrainingConfig(
        str(tiny_model), train_batch_size=4, num_generations=4, max_completion_length=3, learning_rate=1e-3
    )
    rollout = RolloutConfig(name="embedded", n=4, temperature=1.0, top_p=1.0)
    config = training.to_config(
        rollout,
        AgentConfig(),
        data={"train_files": [str(task_files / "train.jsonl")], "max_prompt_length": 8},
        reward=str(task_files / "reward.py"),
        trainer={"total_training_steps": 1, "default_local_dir": str(tmp_path), "experiment_name": "flat"},
    )
    assert config.actor_rollout_ref.rollout.max_num_seqs == 128
    with Trainer(config) as trainer:
        trainer.train()
    assert (tmp_path / "flat" / "final" / "model.safetensors").is_file()


def test_a_key_given_twice_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.n is given twice: 4 and 2"):
        TrainingConfig("m", num_generations=4).to_config(RolloutConfig(name="embedded", n=2, top_p=1.0))
    with pytest.raises(ConfigError, match=r"data\.train_batch_size = 1024: given twice"):
        TrainingConfig("m").to_config(data={"train_batch_size": 4})


def test_the_documents_sampling_is_kept_and_its_engine_named():
    tree = RolloutConfig(n=4).to_config()
    assert (tree.actor_rollout_ref.rollout.temperature, tree.actor_rollout_ref.rollout.top_p) == (0.7, 0.9)
    with pytest.raises(ConfigError, match=r"rollout\.name = 'vllm': this engine comes in a later release"):
        require_runnable(tree)
