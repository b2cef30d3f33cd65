"""The fused layers of the Llama family against the layers of transformers, and their kernels against plain torch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from ullage.model import fast_decoder
from ullage.model.attention import Extras, Span
from ullage.model.fast_decoder import FastDecoder, siblings, supports
from ullage.model.kernels import fused, parts
from ullage.model.lora import Settings, new_adapter
from ullage.model.random_weights import random_model
from ullage.model.side_by_side import lay_side_by_side
from ullage.model.target import Target
from ullage.rollout.embedded.layouts import DecodeLayout, PrefillLayout

CPU = Target("cpu", 0, (0, 0), 8 << 30)
PAGE = 16
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


def make(kind, **options):
    model = random_model(AutoConfig.for_model(kind, **(SIZES | options)), CPU, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a mistake
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return model


def prompts(model, lengths):
    """An arena where nothing is, the table of pages, and random prompts: ids, positions, spans, places, next tokens."""
    layers, heads, size = model.cache_shape
    pages = max(lengths) // PAGE + 1
    arena = torch.full((layers, 2, pages * len(lengths), PAGE, heads, size), float("nan"))
    table = torch.arange(pages * len(lengths)).view(len(lengths), pages)
    ids = torch.randint(0, 96, (sum(lengths) + len(lengths),), generator=torch.Generator().manual_seed(1))
    spans, places, positions, start = [], [], [], 0
    for row, length in enumerate(lengths):
        spans.append(Span(start, length, ()))
        places += [int(table[row, i // PAGE]) * PAGE + i % PAGE for i in range(length)]
        positions += range(length)
        start += length
    return arena, table, ids[:start], torch.tensor(positions), spans, torch.tensor(places), ids[start:]


def prefilled(model, lengths):
    """An arena with the keys and values of random prompts, the table of their pages, and their next tokens."""
    arena, table, ids, positions, spans, places, following = prompts(model, lengths)
    model.hidden(ids[None], positions[None], PrefillLayout(spans, arena, places, CPU))
    return arena, table, following


CASES = {
    "llama": ("llama", {}),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "qwen2, biases": ("qwen2", {}),
    "qwen3, norms of queries and keys": ("qwen3", {}),
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_hidden_states_are_those_of_transformers(name, together):
    kind, options = CASES[name]
    model, lengths = make(kind, **options), (1, 15, 16, 33)
    assert supports(model)
    if together:
        lay_side_by_side(siblings(model.module), CPU.device, torch.float32)
    arena, table, ids = prefilled(model, lengths)
    cached = torch.tensor(lengths)
    places = table.gather(1, (cached // PAGE)[:, None])[:, 0] * PAGE + cached % PAGE
    other = arena.clone()
    layout = DecodeLayout(other, places, table, cached + 1, CPU)
    want = model.hidden(ids[None], cached[None], layout)

    got = FastDecoder(model).hidden(ids, cached, DecodeLayout(arena, places, table, cached + 1, CPU).attend_projected)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
    torch.testing.assert_close(arena, other, rtol=0, atol=5e-6, equal_nan=True)
    assert not torch.equal(got[0], got[1])


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_prompts_are_prefilled_as_by_transformers(name, together):
    kind, options = CASES[name]
    model, lengths = make(kind, **options), (1, 15, 16, 33)
    if together:
        lay_side_by_side(siblings(model.module), CPU.device, torch.float32)
    arena, _, ids, positions, spans, places, _ = prompts(model, lengths)
    other, last = arena.clone(), torch.tensor(lengths).cumsum(0) - 1
    want = model.hidden(ids[None], positions[None], PrefillLayout(spans, other, places, CPU))[last]
    layout = PrefillLayout(spans, arena, places, CPU)
    got = FastDecoder(model).hidden(ids, positions, layout.attend_projected, last)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
    torch.testing.assert_close(arena, other, rtol=0, atol=5e-6, equal_nan=True)
    assert not torch.equal(got[0], got[1])


@torch.no_grad()
def test_what_reads_one_input_is_one_product_where_its_weights_lie_side_by_side():
    model = make("qwen2")
    ids, cached = torch.tensor((1, 2)), torch.tensor((5, 9))

    def products():
        with Products() as seen:
            FastDecoder(model).hidden(ids, cached, lambda layer, query, *rest: torch.zeros_like(query))
        return seen.widths

    layer = [96, 32, 32, 48, 80, 80, 48]
    assert products() == layer * 3
    lay_side_by_side(siblings(model.module), CPU.device, torch.float32)
    joint = [160, 48, 160, 48]
    assert products() == joint * 3
    moved = model.module.model.layers[1].mlp.up_proj.weight
    moved.data = moved.data.clone()
    assert products() == [*joint, 160, 48, 80, 80, 48, *joint]


class Products(TorchDispatchMode):
    """Columns of all matrix products."""

    def __init__(self):
        super().__init__()
        self.widths = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.widths.append(out.shape[1])
        return out


@torch.no_grad()
@pytest.mark.parametrize("together", [False, True])
def test_adapters_are_applied_in_two_products_more(together):
    model = make("qwen2")
    if together:
        lay_side_by_side(siblings(model.module), CPU.device, torch.float32)
    adapter = new_adapter(model.module, Settings(rank=4, alpha=8), ["all-linear"], 1)
    adapted = model.adapted("actor", adapter)
    for name, parameter in adapted.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    arena, table, ids = prefilled(adapted, (5, 9))
    cached = torch.tensor((5, 9))
    places = table[:, 0] * PAGE + cached
    layout = DecodeLayout(arena.clone(), places, table, cached + 1, CPU)
    want = adapted.hidden(ids[None], cached[None], layout)

    layout = DecodeLayout(arena, places, table, cached + 1, CPU)
    with Products() as seen:
        got = FastDecoder(adapted).hidden(ids, cached, layout.attend_projected)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
    attention, mlp = [96, 4, 96, 32, 4, 32, 32, 4, 32], [80, 4, 80, 80, 4, 80]
    if together:
        attention, mlp = [160, 4, 96, 4, 32, 4, 32], [160, 4, 80, 4, 80]
    assert seen.widths == [*attention, 48, 4, 48, *mlp, 48, 4, 48] * 3


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_products_in_parts_are_the_same_but_for_their_sums(kind, monkeypatch):
    model = make(kind)
    arena, table, ids = prefilled(model, (5, 9))
    cached = torch.tensor((5, 9))
    layout = DecodeLayout(arena, table[:, 0] * PAGE + cached, table, cached + 1, CPU)
    whole = FastDecoder(model).hidden(ids, cached, layout.attend_projected)
    seen = []
    monkeypatch.setattr(fast_decoder, "parts_of", lambda x, layer: seen.append(tuple(layer.weight.shape)) or 4)
    in_parts = FastDecoder(model).hidden(ids, cached, layout.attend_projected)
    assert seen == [(48, 96), (48, 80)] * 3
    assert not torch.equal(in_parts, whole)  # sums in another order
    torch.testing.assert_close(in_parts, whole, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("rows", "inner", "outer", "want"),
    [
        (256, 4864, 896, 4),  # down projections of Qwen2.5: 0.5B
        (256, 8960, 1536, 4),  # 1.5B
        (256, 18944, 3584, 2),  # 7B: 56 tiles
        (128, 18944, 3584, 4),
        (256, 13824, 5120, 1),  # 14B: 80 tiles
        (256, 896, 896, 1),  # its stretches would be short
        (256, 2048, 2048, 2),
        (4096, 4864, 896, 1),  # a prompt
        (256, 4872, 896, 1),  # parts would begin anywhere
    ],
)
def test_as_many_parts_as_a_gpu_has_room_for(rows, inner, outer, want):
    x = torch.empty(rows, inner, device="meta", dtype=torch.bfloat16)  # as a trace of a GPU has it
    layer = torch.nn.Linear(inner, outer, bias=False, device="meta")
    assert parts.parts_of(x, layer) == want
    assert parts.parts_of(x, torch.nn.Linear(inner, outer, device="meta")) == 1
    assert parts.parts_of(torch.empty(rows, inner), layer) == 1


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_other_layers_are_left_to_transformers(kind, options):
    assert not supports(make(kind, **options))


def test_extras_of_the_family_are_scale_and_window_alone():
    seen = []
    model = make("mistral", sliding_window=7)

    def attend(layer, query, key, value, turn, extras):
        seen.append((layer, extras))
        return torch.zeros_like(query)

    FastDecoder(model).hidden(torch.tensor([1]), torch.tensor([3]), attend)
    assert seen == [(layer, Extras(16**-0.5, 7, None, None)) for layer in range(3)]


def test_shapes_without_bytes():
    """What a trace sees of the operators."""
    x = torch.empty(5, 48, device="meta", dtype=torch.bfloat16)
    total, normed = fused.add_norm(x, x, x[0], 1e-6)
    assert (total.shape, normed.dtype) == ((5, 48), torch.bfloat16)
    cos = torch.empty(5, 16, device="meta", dtype=torch.bfloat16)
    arena = torch.empty(1, 2, 4, PAGE, 2, 16, device="meta", dtype=torch.bfloat16)
    places = torch.empty(5, device="meta", dtype=torch.long)
    rest = (cos, cos, None, None, 0.0, arena, 0, places)
    for keeps_keys, tokens in ((False, 0), (True, 5)):
        out, keys = fused.rotate_and_store(x, x[:, :32], x[:, :32], *rest, keeps_keys)
        assert (out.shape, out.device.type) == ((5, 3, 16), "meta")
        assert (keys.shape, keys.device.type) == ((tokens, 2, 16), "meta")
    assert fused.norm(x, x[0], 1e-6).shape == x.shape
    for made in fused.rotations(places, torch.empty(8, device="meta"), 1.0, torch.bfloat16):
        assert (made.shape, made.dtype, made.device.type) == ((5, 16), torch.bfloat16, "meta")
    assert fused.gate(x, x).shape == x.shape
    assert fused.gate(x[:, :24], x[:, 24:]).is_contiguous()
    partial = parts.product_in_parts(x, x, 4)
    assert (partial.shape, partial.dtype, partial.device.type) == ((4, 5, 5), torch.float32, "meta")
    assert fused.add_norm(partial, x[:, :5], x[0, :5], 1e-6)[0].dtype == torch.bfloat16
