"""`Trainer` and `main`: the YAML of the document run for real, checkpoints in and out, failures as errors."""

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

import ullage
from ullage.base.errors import ConfigError, DataError, ModelError, UsageError, WriteError

# Document 002, "Basic PPO Training", as it stands there.
BASIC_PPO = """
actor_rollout_ref:
  model:
    path: "meta-llama/Llama-2-7b-chat-hf"
    enable_gradient_checkpointing: true
  actor:
    ppo_mini_batch_size: 256
    learning_rate: 1e-6
  rollout:
    name: vllm
    tensor_model_parallel_size: 1
    n: 5
data:
  train_files: ["train.parquet"]
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 512
trainer:
  total_epochs: 1
  logger: ["console", "wandb"]
  project_name: "ppo_example"
"""


def weights(folder):
    return {name: tensor.tolist() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


def outcome(run):
    return json.loads((run / "exit.json").read_text())


def test_basic_ppo_training(task_files, tiny_model, tmp_path, monkeypatch):
    from ullage import main

    config = yaml.safe_load(
        BASIC_PPO.replace("meta-llama/Llama-2-7b-chat-hf", str(tiny_model))
        .replace("train.parquet", str(task_files / "train.jsonl"))
        .replace("name: vllm", "name: embedded")
        .replace('["console", "wandb"]', '["console"]')
        .replace("max_response_length: 512", "max_response_length: 3")
        .replace("train_batch_size: 1024", "train_batch_size: 14")
        .replace("ppo_mini_batch_size: 256", "ppo_mini_batch_size: 7")
    )
    config["reward"] = str(task_files / "reward.py")
    monkeypatch.chdir(tmp_path)
    assert main(config) == 0
    [run] = (tmp_path / "runs").iterdir()
    assert outcome(run) == {"code": 0, "reason": "finished", "phase": None, "step": 1, "resume_command": None}
    [row] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["actor/learning_rate"] == 1e-6
    assert len((run / "samples" / "step_1.jsonl").read_text().splitlines()) == 64
    assert not (run / "lock").exists()
    assert weights(run / "final") != weights(tiny_model)
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["project_name"] == "ppo_example"


def test_the_documents_yaml_as_it_is_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        ullage.main(yaml.safe_load(BASIC_PPO))
    assert refused.value.code == 78
    assert "actor_rollout_ref.rollout.name = 'vllm'" in refused.value.cause
    assert refused.value.cause.startswith("2 problems in the config\n  reward.functions = []: no reward")
    assert not (tmp_path / "runs").exists()


def test_a_checkpoint_carries_everything_to_another_run(with_keys, tmp_path):
    many = {"actor_rollout_ref.rollout.val_kwargs.n": 64}  # so that some answer is right
    with ullage.Trainer(with_keys({"trainer.total_training_steps": 3, **many})) as whole:
        whole.train()
    with ullage.Trainer(with_keys({"trainer.total_training_steps": 1, **many})) as first:
        first.train()
        first.save_checkpoint(tmp_path / "mine")
        scores = first.evaluate()
    with ullage.Trainer(with_keys({"trainer.total_training_steps": 3, **many})) as second:
        assert second.evaluate() != scores
        second.load_checkpoint(str(tmp_path / "mine"))
        assert second.evaluate() == scores
        second.train()
    assert weights(second.run_directory / "final") == weights(whole.run_directory / "final")
    assert outcome(second.run_directory)["step"] == 3


def test_evaluate_scores_the_weights_as_they_are(with_keys, tiny_model):
    with ullage.Trainer(with_keys({"actor_rollout_ref.rollout.val_kwargs": {"n": 2}})) as trainer:
        scores = trainer.evaluate()
        assert trainer.evaluate() == scores
        assert sorted(scores) == [
            "eval/val/best@1", "eval/val/best@2", "eval/val/mean@2", "eval/val/pass@1", "eval/val/pass@2",
        ]  # fmt: skip
        rows = [json.loads(line) for line in (trainer.run_directory / "samples/eval_0.jsonl").read_text().splitlines()]
        assert scores["eval/val/mean@2"] == pytest.approx(sum(row["reward"] for row in rows) / 4, abs=1e-12)
        assert trainer.config.train_batch_size == 4


def test_what_cannot_be_done_is_said(config, with_keys, tmp_path):
    with ullage.Trainer(with_keys({"data.val_files": []})) as trainer:
        with pytest.raises(ConfigError, match="no held-out data"):
            trainer.evaluate()
        with pytest.raises(ModelError, match="no checkpoint in"):
            trainer.load_checkpoint(tmp_path)
        trainer.save_checkpoint(tmp_path / "there")
        trainer.save_checkpoint(tmp_path / "there")  # its own kind is replaced
        with pytest.raises(WriteError, match="exists and is no checkpoint"):
            trainer.save_checkpoint(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "there"]
    with pytest.raises(UsageError, match="this trainer is closed"):
        trainer.train()
    (tmp_path / "there" / "state.json").write_text("{}")
    with ullage.Trainer(config) as trainer, pytest.raises(WriteError, match="damaged checkpoint"):
        trainer.load_checkpoint(tmp_path / "there")


def test_a_run_that_its_input_ends_leaves_nothing(with_keys, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    trainer = ullage.Trainer(with_keys({"data.train_files": [str(tmp_path / "empty.jsonl")]}))
    with pytest.raises(DataError):
        trainer.train()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_file_or_our_own_config_will_do(config, tmp_path):
    from ullage.config.load import load_config

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    tree = load_config(tmp_path / "run.yaml").config
    for given in (tmp_path / "run.yaml", str(tmp_path / "run.yaml"), tree):
        assert ullage.Trainer(given).config.tree == tree
    with pytest.raises(ConfigError, match="a config is a mapping of keys, not list"):
        ullage.Trainer([1])


@pytest.mark.slow
def test_several_ranks_are_started_as_the_command_does(with_keys, tmp_path):
    with ullage.Trainer(with_keys({"trainer.n_gpus_per_node": 2, "trainer.device": "cpu"})) as trainer:
        trainer.train()
        trainer.save_checkpoint(tmp_path / "mine")
        with pytest.raises(ConfigError, match=r"evaluate\(\) runs on one rank"):
            trainer.evaluate()
    assert (tmp_path / "mine" / "manifest.json").is_file()
    assert outcome(trainer.run_directory)["step"] == 2
