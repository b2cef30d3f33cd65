"""Compiled blocks: what they keep for the backward pass, how often they are compiled, and that no number changes.

Quick tests have blocks that are an MLP and little else, and stop before code is generated: what is kept is settled by
then. Slow ones run the code of whole decoder layers.
"""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from transformers import AutoConfig, AutoModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from ullage.engine.compiled import compile_layers
from ullage.engine.gated import set_product
from ullage.engine.offload import AsyncDoubleBufferGroupOffloadHandler, offload_activations
from ullage.engine.recompute import recompute_layers
from ullage.model import attention
from ullage.model.lora import Adapter, Adapters, Pair, Settings, new_adapter

HIDDEN, MLP, HEADS, KV_HEADS, SIZE, RANK = 32, 80, 4, 2, 12, 3
QUERY, KEYS = HEADS * SIZE, KV_HEADS * SIZE
SIZES = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "pad_token_id": 0,
}


class _Block(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.mlp = LlamaMLP(LlamaConfig(**SIZES)).to(dtype)

    def forward(self, hidden, *, factor):
        return hidden + factor * self.mlp(hidden)


class Blocks(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(_Block(dtype) for _ in range(3))
        self.start = torch.nn.Embedding(64, HIDDEN, dtype=dtype)

    def forward(self, ids):
        hidden = self.start(ids)
        for layer in self.layers:
            hidden = layer(hidden, factor=2.0)
        return hidden


class _Causal:
    """One sequence by one kernel, in the dtype it came in, as on a GPU."""

    def attend(self, layer, query, key, value, extras):
        parts = (part[None] for part in (query, key, value))
        out = functional.scaled_dot_product_attention(*parts, is_causal=True, scale=extras.scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


class Decoder(torch.nn.Module):
    """The layers of a causal language model of this kind."""

    def __init__(self, kind, dtype):
        super().__init__()
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, use_cache=False, **SIZES)
        self.model = AutoModel.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
        self.layers = self.model.layers

    def forward(self, ids):
        positions = torch.arange(ids.shape[1])[None]
        return self.model(input_ids=ids, position_ids=positions, layout=_Causal()).last_hidden_state

    def adapt(self, dtype):
        made = new_adapter(self.model, Settings(rank=RANK, alpha=4.0), ["all-linear"], seed=3)
        generator = torch.Generator().manual_seed(3)
        layers = {n: Pair(p.down, torch.randn(p.up.shape, generator=generator) * 0.3) for n, p in made.layers.items()}
        Adapters(self.model, wide=False).attach("actor", Adapter(made.settings, layers), dtype)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def without_code(monkeypatch):
    backend = "aot_eager_decomp_partition"  # traced, differentiated and split in two, as for the compiler
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


def make_ids(num_tokens):
    return torch.arange(num_tokens)[None] * 5 % 64


def gradients(model, lengths=(10, 7)):
    """Of all trained weights after passes of several lengths; what came out comes first."""
    outs = [model(make_ids(length)) for length in lengths]
    loss = sum((out * torch.sin(torch.arange(out.numel())).view(out.shape)).sum() for out in outs)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*(out.detach() for out in outs), *torch.autograd.grad(loss, trained)]


def assert_equal(got, want):
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def made_again(model):
    compile_layers(model.layers)
    return model


def kept(model):
    """Compiled as the compiler would have it."""
    compile_layers(model.layers)
    for layer in model.layers:
        set_product(layer, None)
    return model


def saved_per_token(model, num_tokens=36):
    """Bytes for each token of each tensor that autograd saves in the last layer.

    Without weights, single numbers, and the angles of the positions, which all layers share.
    """
    layer, weights, found = model.layers[-1], list(model.parameters()), {}
    plain = layer.forward

    def watched(*args, **kwargs):
        known = {part.untyped_storage().data_ptr() for part in (*weights, *kwargs.get("position_embeddings", ()))}

        def push(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known and tensor.numel() > 1:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(push, lambda tensor: tensor):
            return plain(*args, **kwargs)

    layer.forward = watched
    out = model(make_ids(num_tokens))  # and with it what was saved, so that no two have the same place
    assert out.requires_grad
    return sorted(num_bytes / num_tokens for num_bytes in found.values())


def test_the_product_is_not_kept(without_code):
    assert saved_per_token(made_again(Blocks())) == [4 * HIDDEN, 4 * MLP, 4 * MLP]
    assert saved_per_token(kept(Blocks())) == [4 * HIDDEN, 4 * MLP, 4 * MLP, 4 * MLP]


def test_one_compilation_serves_all_layers_and_lengths(without_code):
    gradients(made_again(Blocks()), lengths=(10, 7, 12))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_without_gradients_nothing_is_compiled(without_code):
    model = Blocks()
    want = model(make_ids(9)).detach()
    made_again(model)
    with torch.no_grad():
        assert torch.equal(model(make_ids(9)), want)
    assert not counters["stats"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_changes(without_code, dtype):
    assert_equal(gradients(made_again(Blocks(dtype))), gradients(kept(Blocks(dtype))))


@pytest.mark.parametrize(
    ("recompute", "saved"),
    [
        pytest.param(False, 7 * (HIDDEN + 2 * MLP), id="what layers keep"),
        pytest.param(True, 7 * HIDDEN, id="inputs of layers that run again"),
    ],
)
def test_recompute_and_offload_around_it(without_code, recompute, saved):
    want = gradients(made_again(Blocks()))
    model = made_again(Blocks())
    if recompute:
        recompute_layers(model.layers)
    handler = AsyncDoubleBufferGroupOffloadHandler(2, 3, device="cpu", min_bytes=256)
    offload_activations(model.layers, handler)
    assert_equal(gradients(model), want)
    assert (handler.saved_bytes, handler.offloaded_bytes) == (3 * 4 * saved, 2 * 4 * saved)


def test_a_second_role_can_ask_too(without_code):
    assert_equal(gradients(made_again(made_again(Blocks()))), gradients(made_again(Blocks())))


ALL = 4 * [2 * HIDDEN] + 2 * [2 * MLP] + 2 * [2 * QUERY] + 2 * [2 * KEYS] + [4 * HEADS] + 2 * [4]
"""Of two norms input, result and a number; queries, keys, values, what attention made and its normalisers; gate, up."""
HEAD_NORMS = [2 * QUERY, 2 * KEYS, 4 * HEADS, 4 * KV_HEADS]
THIN = 7 * [2 * RANK]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapted", "more"),
    [("qwen2", False, []), ("qwen3", False, HEAD_NORMS), ("qwen2", True, THIN), ("qwen3", True, HEAD_NORMS + THIN)],
)
def test_what_decoder_layers_keep(kind, adapted, more):
    model = Decoder(kind, torch.bfloat16)
    if adapted:
        model.adapt(torch.bfloat16)
    assert saved_per_token(made_again(model)) == sorted(ALL + more)


# Not adapted in bfloat16: there the compiler adds the adapter's part to a factor, and makes the product of the sum
# before it is rounded. Made again, the product is that of what was kept, as in layers that are not compiled.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapted", "dtype"),
    [
        ("qwen2", False, torch.bfloat16),
        ("qwen3", False, torch.bfloat16),
        ("gemma2", False, torch.bfloat16),
        ("qwen2", True, torch.float32),
    ],
)
def test_no_number_of_decoder_layers_changes(kind, adapted, dtype):
    found = []
    for change in (made_again, kept):
        model = Decoder(kind, dtype)
        if adapted:
            model.adapt(dtype)
        found.append(gradients(change(model)))
    assert_equal(*found)
