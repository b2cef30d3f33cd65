"""Runs that train adapters on quantised weights: PPO's three roles on one base, resumed, written, evaluated."""

import json

import pytest
import torch
from adapter_runs import contents, rows_of, trainer_of
from safetensors.torch import load_file

from ullage.cli.main import main
from ullage.model.load import load_model
from ullage.model.lora import linear_layers
from ullage.model.quantise import Int8Weight, NF4Weight, plain_weight
from ullage.model.target import find_target


@pytest.fixture(scope="module")
def train(tmp_path_factory, tiny_model):
    """Runs of PPO on 4-bit weights."""
    return trainer_of(
        tmp_path_factory.mktemp("qlora"),
        tiny_model,
        algorithm="ppo",
        actor_rollout_ref__model__quantization="nf4",
        critic__model__lora_rank=2,
        critic__optim__lr=1e-3,
    )


@pytest.fixture(scope="module")
def ppo(train):
    return train("ppo")


def steps_of(run):
    return [row for row in rows_of(run) if "actor/loss" in row]


def untimed(rows):
    """Rows without what a clock or an allocator says."""
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "memory/")) and "second" not in key}
        for row in rows
    ]


def stored_bytes(folder, weight):
    """Of the whole model with its linear layers below the head in this format."""
    tensors = load_file(folder / "model.safetensors")
    projections = [name for name in tensors if "_proj." in name]
    assert len(projections) == 14
    quantised = sum(part.nbytes for name in projections for part in weight(tensors.pop(name)).parameters())
    return quantised + sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.invariant
def test_three_roles_learn_on_one_base_of_four_bits(ppo, tiny_model):
    steps = steps_of(ppo)
    assert len(steps) == 4
    assert all(0 <= row["reward/mean"] <= 1 for row in steps)
    assert all(row["critic/grad_norm"] > 0 and row["actor/grad_norm"] > 0 for row in steps)
    assert [row["rollout/logprob_gap_mean"] for row in steps] == [0.0] * 4
    assert steps[3]["actor/kl_ref"] > steps[0]["actor/kl_ref"] > 0  # the second mini-batch meets a moved policy
    folder = ppo / "checkpoints" / "step_4"
    trained = [load_file(folder / "critic.safetensors"), load_file(folder / "model" / "adapter_model.safetensors")]
    expected = sum(tensor.nbytes for tensors in trained for tensor in tensors.values())
    expected += stored_bytes(tiny_model, NF4Weight)
    lines = [json.loads(line) for line in (ppo / "memory.jsonl").read_text().splitlines()]
    assert {line["components"]["weights"] for line in lines if line["phase"] == "update"} == {expected}


@pytest.mark.invariant
def test_a_resumed_run_equals_one_that_was_not_stopped(train, ppo):
    run = train("stopped", trainer__total_training_steps=2)
    assert main(["resume", str(run), "trainer.total_training_steps=4"]) == 0
    for part in ("checkpoints/step_4/model", "final"):
        assert contents(run / part) == contents(ppo / part)
    for name in ("optimizer", "critic", "critic_optimizer"):
        path = f"checkpoints/step_4/{name}.safetensors"
        assert (run / path).read_bytes() == (ppo / path).read_bytes()
    assert untimed(rows_of(run)) == untimed(rows_of(ppo))
    assert main(["resume", str(run), "actor_rollout_ref.model.quantization=int8"]) == 78


def test_final_is_a_plain_model_and_its_adapter_names_the_full_one(ppo, tiny_model, tmp_path):
    adapter = ppo / "final" / "adapter"
    assert contents(adapter) == contents(ppo / "checkpoints" / "step_4" / "model")
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny_model)
    model = load_model(str(adapter), find_target("cpu", 0))
    merged = load_file(ppo / "final" / "model.safetensors")
    assert model.adapters is not None
    for name, layer in linear_layers(model.module).items():
        change = layer.adapters["actor"].product()
        expected = (plain_weight(layer).double() + change).float()
        assert torch.equal(merged[f"{name}.weight"], expected)
    assert main(["export", str(ppo), str(tmp_path / "out"), "--step", "4"]) == 0
    plain = {name: content for name, content in contents(ppo / "final").items() if not name.startswith("adapter/")}
    assert contents(tmp_path / "out") == plain


def test_a_checkpoint_evaluates_as_the_run_did_and_passes_the_checks_of_a_model(ppo, capsys):
    own = {key: value for key, value in rows_of(ppo)[-1].items() if key.startswith("eval/")}
    folder = ppo / "checkpoints" / "step_4"
    assert main(["eval", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"].items() >= own.items()
    assert main(["doctor", str(folder / "model")]) == 0


def test_eight_bits_with_a_critic_of_its_own_that_is_trained_whole(train, tiny_model):
    run = train(
        "int8",
        actor_rollout_ref__model__quantization="int8",
        actor_rollout_ref__model__dtype="bfloat16",
        critic__model__lora_rank=0,
        trainer__total_training_steps=1,
        trainer__test_freq=-1,
    )
    (step,) = steps_of(run)
    assert 0 <= step["reward/mean"] <= 1
    folder = run / "checkpoints" / "step_1"
    critic = load_file(folder / "critic.safetensors")
    assert len(critic) == 2 * 9 + 2 + 2  # two layers of seven linear layers and two norms; embedding, norm; head
    trained = [critic, load_file(folder / "model" / "adapter_model.safetensors")]
    expected = sum(tensor.nbytes for tensors in trained for tensor in tensors.values())
    halved = {name: tensor.bfloat16() for name, tensor in load_file(tiny_model / "model.safetensors").items()}
    for name, tensor in halved.items():
        parts = Int8Weight(tensor).parameters() if "_proj." in name else [tensor]
        expected += sum(part.nbytes for part in parts)
    lines = [json.loads(line) for line in (run / "memory.jsonl").read_text().splitlines()]
    assert {line["components"]["weights"] for line in lines if line["phase"] == "update"} == {expected}


def test_weights_that_are_trained_cannot_be_quantised(train, capsys):
    train("refused", 78, actor_rollout_ref__model__lora_rank=0)
    assert "only weights that are not trained can be quantised; set lora_rank" in capsys.readouterr().err
