"""Weights of linear layers that lie side by side: who sees what, and what takes no notice of it."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoConfig

from ullage.engine.parking import Parked
from ullage.model.fast_decoder import siblings
from ullage.model.load import load_model
from ullage.model.lora import Settings, new_adapter
from ullage.model.random_weights import random_model
from ullage.model.side_by_side import apart, joint, lay_side_by_side
from ullage.model.target import Target
from ullage.run.trace_phases import record_phases, traced_target

CPU = Target("cpu", 0, (0, 0), 8 << 30)
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}
GROUPS = 2 * SIZES["num_hidden_layers"]


def make(kind="qwen2", together=True, **options):
    model = random_model(AutoConfig.for_model(kind, **(SIZES | options)), CPU, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    if together:
        lay_side_by_side(siblings(model.module), CPU.device, torch.float32)
    return model


def joints(model):
    return [joint(group) for group in siblings(model.module)]


def test_one_product_is_all_of_them_and_nothing_else_has_changed():
    model, plain = make(), make(together=False)
    assert joints(plain) == [None] * GROUPS
    for (name, got), (_, want) in zip(model.module.named_parameters(), plain.module.named_parameters(), strict=True):
        assert torch.equal(got, want), name
        assert got.is_contiguous(), name
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    for group, plain_group in zip(siblings(model.module), siblings(plain.module), strict=True):
        together = joint(group)
        assert (together.bias is not None) == (len(group) == 3), "queries, keys and values of Qwen2 have biases"
        want = torch.cat([layer(x) for layer in plain_group], dim=1)
        torch.testing.assert_close(functional.linear(x, *together), want, rtol=0, atol=1e-6)


def test_updates_in_place_are_seen_by_both_and_gradients_are_each_ones_own():
    model = make()
    key = model.module.model.layers[1].self_attn.k_proj
    together = joints(model)[2]
    rows = slice(96, 128)
    key(torch.ones(1, 48)).sum().backward()
    assert model.module.model.layers[1].self_attn.q_proj.weight.grad is None
    before = together.weight.clone()
    torch.optim.SGD([key.weight, key.bias], lr=0.5).step()
    assert torch.equal(together.weight[rows], key.weight)
    assert torch.equal(together.bias[rows], key.bias)
    torch.testing.assert_close(together.weight[rows], before[rows] - 0.5)
    before[rows] = together.weight[rows]
    assert torch.equal(together.weight, before)


def test_weights_that_move_are_no_longer_one():
    model = make("llama")
    assert None not in joints(model)
    Parked(model.module.parameters(), CPU.device, trained=False)
    # One after another in one buffer, as the parameters come: with no bias between them they still lie side by side.
    assert None not in joints(model)
    moved = model.module.model.layers[0].self_attn.k_proj.weight
    moved.data = moved.data.clone()
    assert [found is None for found in joints(model)] == [True, False, False, False, False, False]


def test_parked_biases_lie_between_weights():
    model = make("qwen2")
    Parked(model.module.parameters(), CPU.device, trained=False)
    assert [found is None for found in joints(model)] == [True, False] * 3


@pytest.mark.parametrize("together", [False, True])
def test_adapters_leave_the_weights_where_they_lie(together):
    model = make("qwen2", together=together)
    before = joints(model)
    adapted = model.adapted("actor", new_adapter(model.module, Settings(rank=4, alpha=8), ["q_proj", "up_proj"], 1))
    if not together:
        assert joints(adapted) == [None] * GROUPS
        return
    for one, other in zip(before, joints(adapted), strict=True):
        assert (one.weight.data_ptr(), one.weight.shape) == (other.weight.data_ptr(), other.weight.shape)


def test_layers_that_are_not_plain_are_left_alone():
    config = AutoConfig.for_model("llama", **SIZES)
    quantised = random_model(config, CPU, dtype=torch.float32, quantization="int8")
    lay_side_by_side(siblings(quantised.module), CPU.device, torch.float32)
    assert joints(quantised) == [None] * GROUPS
    assert list(siblings(make("gemma2", query_pre_attn_scalar=16).module)) == []


def test_saved_without_copies_and_loaded_again(tmp_path, tiny_model):
    model = load_model(str(tiny_model), CPU)
    state = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    lay_side_by_side(siblings(model.module), CPU.device, torch.float32)
    own = apart(model.module.state_dict())
    for name, tensor in model.module.state_dict().items():
        assert own[name].data_ptr() == tensor.data_ptr(), name
        assert own[name].untyped_storage().nbytes() == own[name].nbytes, name
    model.save(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for name, tensor in load_model(str(tmp_path), CPU).module.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert {name: state[name].nbytes for name in written} == {name: each.nbytes for name, each in written.items()}


def test_a_trace_sees_one_layers_weights_twice():
    """What models for CUDA are, with and without memory."""
    traced = traced_target((9, 0), 140 << 30)
    config = AutoConfig.for_model("llama", **SIZES)
    kept = []

    def step(phase):
        phase("load")
        kept.append(random_model(config, traced, dtype=torch.bfloat16))
        phase("loaded")

    trace = record_phases(step)
    assert None not in joints(kept[0])
    most, total = (trace.components(phase)["activations"] for phase in ("load", "loaded"))
    weights, rope = (sum(each.nbytes for each in of()) for of in (kept[0].module.parameters, kept[0].module.buffers))
    assert total == weights + rope
    assert most - total == 2 * 80 * 48 * 2


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_models_for_cuda_are_laid_so(kind):
    traced = traced_target((9, 0), 140 << 30)
    assert None not in joints(random_model(AutoConfig.for_model(kind, **SIZES), traced, dtype=torch.bfloat16))
