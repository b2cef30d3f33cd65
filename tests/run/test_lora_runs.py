"""Runs that train adapters: what they learn from, write, resume and export; PPO's three roles on one frozen base."""

import json

import pytest
import torch
from adapter_runs import contents, rows_of, trainer_of
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ullage.cli.main import main

IDS = torch.tensor([[1, *range(5, 30)]])
BASE_TENSORS = 2 * 9 + 3  # two layers of seven linear layers and two norms; embedding, norm and head


@pytest.fixture(scope="module")
def train(tmp_path_factory, tiny_model):
    return trainer_of(tmp_path_factory.mktemp("lora"), tiny_model)


@pytest.fixture(scope="module")
def grpo(train):
    return train("grpo")


PPO = {
    "algorithm": "ppo",
    "critic__model__lora_rank": 2,
    "critic__optim__lr": 1e-2,
    "actor_rollout_ref__model__enable_gradient_checkpointing": "true",
}


@pytest.fixture(scope="module")
def ppo(train):
    return train("ppo", **PPO)


def untimed(rows):
    """Rows without what a clock or an allocator says."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "memory/")) and "second" not in key}
        for row in rows
    ]


@torch.no_grad()
def logits(module):
    return module.eval()(input_ids=IDS, use_cache=False).logits[0]


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.invariant
def test_the_engine_and_the_reference_use_the_same_weights_with_and_without_the_adapter(grpo):
    steps = [row for row in rows_of(grpo) if "actor/loss" in row]
    assert len(steps) == 4
    assert all(0 <= row["reward/mean"] <= 1 and row["actor/grad_norm"] > 0 for row in steps)
    assert [row["rollout/logprob_gap_mean"] for row in steps] == [0.0] * 4
    assert steps[3]["actor/kl_ref"] > steps[0]["actor/kl_ref"] > 0  # the second mini-batch meets a moved policy


def test_a_checkpoint_holds_the_adapter_only(grpo):
    folder = grpo / "checkpoints" / "step_4"
    names = {path.name for path in (folder / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"} <= names
    assert not names & {"model.safetensors", "config.json"}
    with safe_open(folder / "optimizer.safetensors", framework="pt") as opened:
        keys = set(opened.keys())
    assert len(keys) == 1 + 2 * 2 * 14  # the step, and two moments of both factors of each linear layer
    assert {key.rsplit(".", 1)[1] for key in keys - {"step"}} == {"down", "up"}
    settings = json.loads((folder / "model" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (settings["r"], settings["lora_alpha"], settings["bias"]) == (4, 16, "none")


@pytest.mark.invariant
def test_adapter_in_peft_and_merged_model_in_transformers_have_the_same_logits(grpo, tiny_model):
    from peft import PeftModel

    assert contents(grpo / "final" / "adapter") == contents(grpo / "checkpoints" / "step_4" / "model")
    base = logits(plain(tiny_model))
    theirs = logits(PeftModel.from_pretrained(plain(tiny_model), grpo / "final" / "adapter"))
    merged = logits(plain(grpo / "final"))
    assert (theirs - merged).abs().max() <= 1e-5
    assert (theirs - base).abs().max() > 1e-2
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_model, grpo / "final"))
    assert before.keys() == after.keys()
    assert len(before) == BASE_TENSORS
    assert sum(not torch.equal(before[name], after[name]) for name in before) == 14


@pytest.mark.invariant
def test_a_resumed_run_of_adapters_equals_one_that_was_not_stopped(train, ppo):
    run = train("stopped", trainer__total_training_steps=2, **PPO)
    assert main(["resume", str(run), "trainer.total_training_steps=4"]) == 0
    for part in ("checkpoints/step_4/model", "final"):
        assert contents(run / part) == contents(ppo / part)
    for name in ("optimizer", "critic", "critic_optimizer"):
        path = f"checkpoints/step_4/{name}.safetensors"
        assert (run / path).read_bytes() == (ppo / path).read_bytes()
    assert untimed(rows_of(run)) == untimed(rows_of(ppo))


def test_three_roles_have_one_base(ppo, tiny_model):
    critic = load_file(ppo / "checkpoints" / "step_4" / "critic.safetensors")
    assert len(critic) == 2 * 14 + 2
    assert all(name.startswith(("trunk.", "head.")) and critic[name].abs().max() > 0 for name in critic)
    steps = [row for row in rows_of(ppo) if "critic/loss" in row]
    assert len(steps) == 4
    assert all(row["critic/grad_norm"] > 0 and row["actor/grad_norm"] > 0 for row in steps)
    trained = [critic, load_file(ppo / "checkpoints" / "step_4" / "model" / "adapter_model.safetensors")]
    base = load_file(tiny_model / "model.safetensors")
    expected = sum(tensor.nbytes for tensors in (*trained, base) for tensor in tensors.values())
    lines = [json.loads(line) for line in (ppo / "memory.jsonl").read_text().splitlines()]
    assert {line["components"]["weights"] for line in lines if line["phase"] == "update"} == {expected}


def test_a_critic_of_adapters_beside_an_actor_of_weights(train):
    run = train("beside", **PPO, actor_rollout_ref__model__lora_rank=0, trainer__total_training_steps=1)
    critic = load_file(run / "checkpoints" / "step_1" / "critic.safetensors")
    assert len(critic) == 2 * 14 + 2
    assert "trunk.layers.0.self_attn.q_proj.up" in critic
    names = {path.name for path in (run / "checkpoints" / "step_1" / "model").iterdir()}
    assert "model.safetensors" in names
    assert not (run / "final" / "adapter").exists()
    assert main(["export", str(run), str(run / "out"), "--adapter"]) == 66


def test_the_reference_of_an_adapter_is_its_base(train, grpo):
    adapter = grpo / "final" / "adapter"
    run = train(
        "continued",
        actor_rollout_ref__model__lora_rank=0,
        actor_rollout_ref__model__lora_adapter_path=adapter,
        actor_rollout_ref__actor__optim__lr=0,
        trainer__total_training_steps=1,
    )
    assert contents(run / "final" / "adapter") == contents(adapter)
    assert contents(run / "final")["model.safetensors"] == contents(grpo / "final")["model.safetensors"]
    (step,) = [row for row in rows_of(run) if "actor/loss" in row]
    assert step["actor/kl_ref"] > 1e-3
    assert step["rollout/logprob_gap_mean"] == 0


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"lora_rank": 8, "lora_adapter_path": "ADAPTER"}, 78, "has rank 4"),
        ({"path": "ADAPTER"}, 78, "an adapter, not a model"),
        ({"lora_adapter_path": "/no/such/folder"}, 66, "is not a PEFT adapter folder"),
        ({"target_modules": "[qproj]"}, 78, "did you mean q_proj"),
        ({"target_modules": "[]"}, 78, "must name a linear layer"),
    ],
)
def test_settings_that_cannot_be(train, grpo, capsys, changes, code, message):
    given = {key: grpo / "final" / "adapter" if value == "ADAPTER" else value for key, value in changes.items()}
    name = f"refused_{len(list(grpo.parent.iterdir()))}"
    train(name, code, **{f"actor_rollout_ref__model__{key}": value for key, value in given.items()})
    assert message in capsys.readouterr().err


# --- what the verbs do with an adapter's checkpoint ---


def test_export_merges_a_checkpoint_or_writes_its_adapter(grpo, tmp_path):
    assert main(["export", str(grpo), str(tmp_path / "merged"), "--step", "4"]) == 0
    assert contents(tmp_path / "merged") == {
        name: content for name, content in contents(grpo / "final").items() if not name.startswith("adapter/")
    }
    assert main(["export", str(grpo), str(tmp_path / "whole")]) == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "merged")
    for name, words in (("adapter", []), ("step", ["--step", "4"])):
        assert main(["export", str(grpo), str(tmp_path / name), "--adapter", *words]) == 0
        assert contents(tmp_path / name) == contents(grpo / "final" / "adapter")


def test_export_of_an_adapter_that_is_not_there(tiny_model, tmp_path, capsys):
    assert main(["export", str(tiny_model), str(tmp_path / "out"), "--adapter"]) == 66
    assert "has no adapter" in capsys.readouterr().err
    assert main(["export", str(tiny_model), str(tmp_path / "out"), "--adapter", "--dtype", "bfloat16"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_and_merged_model_evaluate_as_the_run_did(grpo, capsys):
    own = {key: value for key, value in rows_of(grpo)[-1].items() if key.startswith("eval/")}
    assert own
    for folder in (grpo / "checkpoints" / "step_4", grpo / "final"):
        assert main(["eval", str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["metrics"].items() >= own.items()


def test_chat_with_an_adapter(grpo, capsys):
    replies = []
    for folder in (grpo / "checkpoints" / "step_4" / "model", grpo / "final"):
        assert main(["chat", str(folder), "--greedy", "--raw", "--max-tokens", "3", "--prompt", "123=", "--json"]) == 0
        replies.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert replies[0] == replies[1]
