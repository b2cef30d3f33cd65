"""Gated MLPs: which of transformers' are known to be plain, and that ours computes what theirs does."""

import ast
import re
from pathlib import Path
from types import MethodType

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel

from ullage.engine.gated import GATED, gated_mlp, plain_product, set_product

SIZES = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def make_layer(kind="llama", **more):
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(kind, **SIZES, **more), dtype=torch.float32).layers[1]


def gradients(mlp):
    """Of the input and all weights; the output comes first."""
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out = mlp(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *mlp.parameters()])]


class _Spy:
    """A product that can be told from the plain one."""

    def __init__(self, factor=1.0):
        self.factor = factor
        self.calls = 0

    def __call__(self, act_fn, gate, up):
        self.calls += 1
        return self.factor * (act_fn(gate) * up)


def written_forward(found):
    """What a class's forward returns, without names of its own."""
    lines = next(part for part in found.body if isinstance(part, ast.FunctionDef) and part.name == "forward")
    steps = [ast.unparse(line.value) for line in lines.body]
    assert steps[1:] in ([], ["down_proj"]), "one expression, which may have a name"
    return re.sub(rf"\b{lines.args.args[1].arg}\b", "x", steps[0])


def test_all_that_are_known_are_written_as_ours():
    found = {}
    names = re.compile(rf"^class ({'|'.join(GATED)})\(.*?(?=^\S)", re.MULTILINE | re.DOTALL)
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for match in names.finditer(file.read_text(encoding="utf-8")):
            found.setdefault(match[1], set()).add(written_forward(ast.parse(match[0]).body[0]))
    assert found == {name: {"self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"} for name in GATED}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "granite"])
def test_it_computes_what_transformers_does(kind):
    layer = make_layer(kind)
    want = gradients(layer.mlp)
    assert set_product(layer, plain_product)
    got = gradients(layer.mlp)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_the_last_product_counts_until_it_is_taken_away():
    layer, x = make_layer(), torch.ones(1, 3, 16)
    plain, first, last = layer.mlp(x), _Spy(), _Spy(2.0)
    assert set_product(layer, first)
    assert set_product(layer, last)
    assert torch.equal(layer.mlp(x), 2 * plain)
    assert (first.calls, last.calls) == (0, 1)
    assert set_product(layer, None)
    assert torch.equal(layer.mlp(x), plain)
    assert set_product(layer, None)
    assert "forward" not in vars(layer.mlp)


def test_without_gradients_nobody_is_asked():
    layer, x, spy = make_layer(), torch.ones(1, 3, 16), _Spy(2.0)
    plain = layer.mlp(x)
    set_product(layer, spy)
    with torch.no_grad():
        assert torch.equal(layer.mlp(x), plain)
    assert spy.calls == 0


def test_a_forward_that_somebody_else_replaced_is_theirs():
    layer = make_layer()
    theirs = layer.mlp.forward = MethodType(lambda self, x: -x, layer.mlp)
    assert gated_mlp(layer) is None
    assert not set_product(layer, _Spy())
    assert not set_product(layer, None)
    assert layer.mlp.forward is theirs


def test_others_are_left_alone():
    class LlamaMLP(torch.nn.Module):
        """The name alone says nothing."""

    layer = make_layer()
    layer.mlp = LlamaMLP()
    experts = make_layer("qwen3_moe", num_experts=2, moe_intermediate_size=4)
    assert type(experts.mlp).__name__ == "Qwen3MoeSparseMoeBlock"
    for other in (layer, experts, torch.nn.Linear(2, 2)):
        assert gated_mlp(other) is None
        assert not set_product(other, _Spy())
