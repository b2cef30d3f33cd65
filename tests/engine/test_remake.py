"""Layers that make norms, activations and gated products again: what they keep and run, and that nothing changes."""

import gc
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from counted_operators import CountedOperators
from ullage.engine.offload import SynchronizedGroupOffloadHandler, offload_activations
from ullage.engine.recompute import recompute_layers
from ullage.engine.remake import RemadeForward

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TOKENS = 12
KINDS = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "smollm3"]


def make_model(kind, dtype=torch.float32):
    torch.manual_seed(0)
    attention = "eager" if kind == "gemma2" else "sdpa"  # which caps its logits
    config = AutoConfig.for_model(kind, **SIZES, attn_implementation=attention)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def gradients(model):
    """Of all weights, after one pass; the loss comes first."""
    ids = torch.arange(TOKENS)[None] * 5 % 64
    loss = model(ids).logits.float().log_softmax(-1)[0, :, 3].sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def assert_equal(got, want):
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_bits(kind, dtype):
    model = make_model(kind, dtype)
    want = gradients(model)
    recompute_layers(model.model.layers, keep="matmuls")
    assert all(isinstance(layer.forward, RemadeForward) for layer in model.model.layers)
    assert_equal(gradients(model), want)


def test_products_and_attention_run_once_and_cheap_operators_twice():
    model = make_model("qwen3")
    with CountedOperators() as plain:
        gradients(model)
    recompute_layers(model.model.layers, keep="matmuls")
    with CountedOperators() as counted:
        gradients(model)

    def extra(name):
        return counted.names.count(name) - plain.names.count(name)

    layers = 2
    for product in ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert extra(f"aten::{product}") == 0
    assert extra("aten::silu") == layers
    assert extra("aten::rsqrt") == 4 * layers  # before attention and MLP, of queries and of keys


@pytest.mark.parametrize(("kind", "norms"), [("qwen2", 0), ("qwen3", 4 * 8 + 2 * 8)])
def test_a_layer_keeps_its_products_and_the_inputs_of_its_norms(kind, norms):
    model = make_model(kind)
    recompute_layers(model.model.layers, keep="matmuls")
    handler = SynchronizedGroupOffloadHandler(2, device="cpu", min_bytes=1)
    offload_activations(model.model.layers, handler)
    gradients(model)
    hidden, queries, keys, mlp, heads = 32, 4 * 8, 2 * 8, 48, 4
    # Two sums, queries, keys, values, attention's result and normalisers, gate and up; norms of queries and keys keep
    # what goes into them.
    each = 2 * hidden + queries + 2 * keys + queries + heads + 2 * mlp + norms
    positions = 2 * 8  # cosines and sines, once for all layers
    assert handler.saved_bytes == handler.offloaded_bytes == 4 * TOKENS * (2 * each + positions)


def test_what_was_made_again_is_freed_on_the_way():
    model = make_model("llama")
    recompute_layers(model.model.layers, keep="matmuls")
    made = []

    def noted(part, _, out):
        made.append(weakref.ref(out))

    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(noted)
    left = []
    hidden = model.model.embed_tokens.weight[None, :TOKENS].detach().requires_grad_()
    positions = model.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    out = model.model.layers[0](hidden, position_embeddings=positions)
    assert [reference() for reference in made] == [None], "after the forward pass"
    model.model.layers[0].post_attention_layernorm.weight.register_hook(
        lambda _: left.extend(reference() for reference in made)
    )
    out.sum().backward()
    gc.collect()
    assert left == [None, None], "before the norm in front of the MLP"
    assert len(made) == 2


def test_without_gradients_the_layers_are_their_own():
    model = make_model("llama")
    ids = torch.arange(TOKENS)[None]
    with torch.no_grad():
        want = model(ids).logits
        with CountedOperators() as plain:
            model(ids)
        recompute_layers(model.model.layers, keep="matmuls")
        with CountedOperators() as counted:
            got = model(ids).logits
    assert torch.equal(got, want)
    assert counted.names == plain.names


def test_the_last_call_counts_and_nothing_stays_behind():
    model = make_model("qwen3")
    before = [dict(vars(part)) for part in model.modules()]
    want = gradients(model)
    for share, keep in ((1.0, "matmuls"), (0.5, "matmuls"), (1.0, "nothing"), (1.0, "matmuls")):
        recompute_layers(model.model.layers, share=share, keep=keep)
        assert_equal(gradients(model), want)
    recompute_layers(model.model.layers, share=0.0)
    own = {"forward"}
    after = [dict(vars(part)) for part in model.modules()]
    replaced = [set(now) - set(then) for now, then in zip(after, before, strict=True)]
    layers = [index for index, part in enumerate(model.modules()) if part in list(model.model.layers)]
    assert all(names <= (own if index in layers else set()) for index, names in enumerate(replaced))
    assert not any(isinstance(layer.forward, RemadeForward) for layer in model.model.layers)


def test_an_input_changed_in_place_is_noticed():
    model = make_model("llama")
    layer = model.model.layers[0]
    recompute_layers([layer], keep="matmuls")
    source = torch.randn(1, TOKENS, 32, requires_grad=True)
    hidden = source * 2
    positions = model.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    out = layer(hidden, position_embeddings=positions).sum()
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        out.backward()


def test_a_norm_may_be_called_by_name_or_without_gradients_inside_a_layer():
    model = make_model("llama")
    layer = model.model.layers[0]
    norm, plain = layer.input_layernorm, layer.forward

    def forward(hidden, **rest):
        with torch.no_grad():
            norm(hidden)
        return plain(norm(hidden_states=hidden), **rest)

    layer.forward = forward
    want = gradients(model)
    recompute_layers(model.model.layers, keep="matmuls")
    assert_equal(gradients(model), want)


def test_a_second_backward_pass_is_refused():
    model = make_model("llama")
    recompute_layers(model.model.layers, keep="matmuls")
    loss = model(torch.arange(TOKENS)[None]).logits.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="a backward pass runs once"):
        loss.backward()
