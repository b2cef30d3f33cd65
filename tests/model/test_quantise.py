"""Weights in 4 and 8 bits: the numbers of bitsandbytes, products and gradients, and models that load and are saved."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from experience_samples import CPU, load, make_rollouts, rollouts_of
from ullage.base.errors import ModelError
from ullage.batch.pack import Limits
from ullage.engine.recompute import recompute_layers
from ullage.model.attention import PackedLayout, Span
from ullage.model.load import load_model, load_trunk
from ullage.model.lora import Adapter, Pair, Settings, linear_layers, new_adapter
from ullage.model.quantise import DYNAMIC_MAP, NF4, Int8Weight, NF4Weight, QuantisedLinear, linear, plain_weight
from ullage.model.value_model import add_value_head
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.workers.passes import micro_batches, stage_logprobs

IDS = [1, *range(5, 30), 7, 7, 2]
NEAR = 1e-5
BOTH = pytest.mark.parametrize("kind", ["nf4", "int8"])
MISSING = "bitsandbytes is not installed: only the stored numbers are checked"


def random(*shape, dtype=torch.float32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


# --- the formats ---


def test_nf4_by_hand():
    # Two blocks, all sixteen values four times, the largest 2 and 6.
    values = torch.tensor(NF4).repeat(4)
    weight = NF4Weight(torch.stack((2 * values, 6 * values)))
    assert weight.codes.tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF] * 8
    # The mean is 4. What is left, -2 and 2, has the largest 2; -1 is not in the map, whose ends are these:
    ends = [-(1 - 0.9 / 128), 1.0]
    assert weight.offset.item() == 4
    assert weight.nested_absmax.tolist() == [2]
    assert weight.absmax.tolist() == [0, 255]
    scales = [2 * end + 4 for end in ends]
    assert scales == [2.0140625, 6]
    assert torch.equal(weight.dequantised(torch.float32), torch.stack([scale * values for scale in scales]))


def test_the_dynamic_map_by_hand():
    values = torch.tensor(DYNAMIC_MAP)
    assert len(values.unique()) == 256
    assert torch.equal(values, values.sort().values)
    assert values[127] == 0
    assert values[255] == 1
    # One value in [1e-7, 1e-6], two in [1e-6, 1e-5]; the middles of equal parts.
    assert torch.allclose(values[128:131], torch.tensor([5.5e-7, 3.25e-6, 7.75e-6]), rtol=1e-6, atol=0)
    assert torch.allclose(values[191:193], torch.tensor([0.1 + 0.9 / 128, 0.1 + 2.7 / 128]), rtol=1e-6, atol=0)
    assert torch.equal(values[:127], -values[128:255].flip(0))


# What bitsandbytes 0.50.2 makes of the 5 x 70 weights below.
CODES = (
    "06906a17b27c27c37d47e58f5806916a17b27c27d37d47e58f6806917a17b27c17e27f57d58e6816917927a37b37c47d57d58e68169179"
    "27a37b47c47d57d58e7757767867867c37d47e48e58f6906917a17b27c37d47e48e58f6906a17a17b27c37d47e58e58f69067677677778"
    "778778778778776776776777787787787787767767767767867867877877f5806906a17b27c27d37d47e58f6806917a17b27c27d37e47e"
    "58f6806917a17b27c27d"
)
SCALES = [20, 0, 240, 243, 176, 158]
NESTED = [0.31506094336509705]
OFFSET = 0.47381338477134705
WEIGHTS = [
    0.11736489832401276,
    -0.33199721574783325,
    0.0,
    0.1611434668302536,
    -0.25039440393447876,
    0.0,
    0.2101636677980423,
    -0.25039440393447876,
    0.0,
    0.2682982087135315,
]


def stated():
    """Numbers that no generator has to repeat: a walk over multiples of 1/256, larger from row to row."""
    steps = (torch.arange(350) * 89 % 257 - 128) / 256
    return (steps * steps.abs()).view(5, 70) * torch.tensor([[1.0], [0.5], [3.0], [0.25], [2.0]])


def test_the_numbers_of_bitsandbytes():
    weight = NF4Weight(stated())
    assert bytes(weight.codes.tolist()).hex() == CODES
    assert weight.absmax.tolist() == SCALES
    assert weight.nested_absmax.tolist() == NESTED
    assert weight.offset.item() == OFFSET
    assert weight.dequantised(torch.float32)[4, 60:].tolist() == WEIGHTS


def test_int8_by_hand():
    weight = Int8Weight(torch.tensor([[127.0, -63.4, 63.5, 0.4], [-0.5, 0.25, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert weight.absmax.tolist() == [127, 0.5, 0]
    assert weight.codes.tolist() == [[127, -63, 64, 0], [-127, 64, 25, 0], [0, 0, 0, 0]]  # 63.5 to even
    expected = torch.tensor([[127.0, -63.0, 64.0, 0.0], [-0.5, 32 / 127, 12.5 / 127, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(weight.dequantised(torch.float32), expected, rtol=1e-6, atol=0)


def test_zeros_stay_zeros():
    weight = random(3, 64)
    weight[1] = 0
    for made in (NF4Weight(weight), Int8Weight(weight), NF4Weight(torch.zeros(2, 64))):
        assert made.dequantised(torch.float32)[1].tolist() == [0.0] * 64


def test_bytes():
    # 2^17 weights: half a byte each, a byte for 64, four for 64 x 256, and the offset.
    weight = NF4Weight(random(256, 512))
    assert sum(tensor.nbytes for tensor in weight.parameters()) == 2**16 + 2**11 + 4 * 2**3 + 4
    weight = Int8Weight(random(256, 512))
    assert sum(tensor.nbytes for tensor in weight.parameters()) == 2**17 + 4 * 2**8


def test_weights_in_chunks(monkeypatch):
    plain = random(40, 130)
    whole = NF4Weight(plain), Int8Weight(plain)
    monkeypatch.setattr("ullage.model.quantise.CHUNK", 128)
    for one, other in zip(whole, (NF4Weight(plain), Int8Weight(plain)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# --- bitsandbytes itself ---


@pytest.fixture(scope="module")
def library():
    """bitsandbytes, searching for the nearest 8-bit value as on a GPU, not by its table for x86.

    Its own exact search is behind the same operator, for doubles.
    """
    if find_spec("bitsandbytes") is None:
        pytest.skip(MISSING)
    logging.disable(logging.WARNING)  # says which optional kernels there are
    functional = pytest.importorskip("bitsandbytes.functional", reason=MISSING)
    logging.disable(logging.NOTSET)

    def nearest(absmax, blocksize):
        code = functional.create_dynamic_map()
        codes, largest = torch.ops.bitsandbytes.quantize_blockwise.default(absmax.double(), code, blocksize)
        return codes, functional.QuantState(absmax=largest, code=code, blocksize=blocksize, dtype=torch.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "quantize_blockwise", nearest)
        yield functional


SHAPES = pytest.mark.parametrize(
    ("shape", "dtype"),
    [((64, 128), torch.float32), ((576, 1536), torch.float32), ((960, 576), torch.bfloat16), ((33, 70), torch.float32)],
)


@SHAPES
def test_nf4_is_theirs_bit_for_bit(library, shape, dtype):
    plain = random(*shape, dtype=dtype)
    ours = NF4Weight(plain)
    codes, state = library.quantize_4bit(plain, compress_statistics=True, quant_type="nf4")
    theirs = codes.flatten(), state.absmax, state.state2.absmax, state.offset
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), theirs, strict=True))
    assert torch.equal(library.dequantize_4bit(codes, state), ours.dequantised(dtype))
    assert torch.equal(library.create_dynamic_map(), ours.nested_values)


@SHAPES
def test_int8_is_theirs_bit_for_bit(library, shape, dtype):
    plain = random(*shape, dtype=dtype)
    ours = Int8Weight(plain)
    codes, largest, _ = library.int8_vectorwise_quant(plain)
    assert torch.equal(codes, ours.codes)
    assert torch.equal(largest, ours.absmax)
    assert torch.equal(library.int8_vectorwise_dequant(codes, largest), ours.dequantised(torch.float32))


def test_peft_on_their_base_has_our_logits(library, tiny_model, tmp_path):
    from peft import PeftModel

    model = adapted(tiny_model, "nf4", targets=["q_proj", "down_proj"])
    model.save(tmp_path / "adapter")
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    base = AutoModelForCausalLM.from_pretrained(
        tiny_model,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=settings,
        device_map={"": "cpu"},
    )
    # In training mode: in the other one, on a CPU, it computes in bfloat16.
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").train()
    with torch.no_grad():
        found = theirs(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    assert (found - logits(model)).abs().max() <= NEAR
    assert (found - logits(adapted(tiny_model, None, targets=["q_proj", "down_proj"]))).abs().max() > 1e-2


# --- products ---


@BOTH
def test_a_product_and_its_gradients_are_those_of_the_weight_it_stands_for(kind):
    plain = torch.nn.Linear(70, 40)
    weight = (NF4Weight if kind == "nf4" else Int8Weight)(plain.weight.detach())
    layer = QuantisedLinear(plain, weight)
    x, bias = random(2, 5, 70).requires_grad_(), plain.bias
    up = random(2, 5, 40, seed=1)
    kept = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = layer(x)
    assert kept == []
    ours = out, *torch.autograd.grad(out, (x, bias), up)
    out = linear(x, plain_weight(layer), bias)
    theirs = out, *torch.autograd.grad(out, (x, bias), up)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert not any(parameter.requires_grad for parameter in weight.parameters())


CHECK_KERNEL = """
import sys, torch
from ullage.model.kernels.nf4 import nf4_dequantise
from ullage.model.quantise import NF4Weight, nf4_dequantise_plain
place = torch.device(sys.argv[1])
for dtype in [getattr(torch, name) for name in sys.argv[2:]]:
    for shape in ((64, 128), (5, 13), (300, 129)):
        weight = NF4Weight(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(place))
        given = (*weight.parameters(), *weight.buffers(), weight.shape.numel(), dtype)
        assert torch.equal(nf4_dequantise(*given), nf4_dequantise_plain(*given)), (dtype, shape)
    torch.library.opcheck(nf4_dequantise, given, test_utils=("test_schema", "test_faketensor"))
"""


@pytest.mark.slow
def test_the_kernel_is_its_plain_twin_under_the_interpreter():
    """In a process of its own: Triton decides when it is imported. It cuts bfloat16 off, where a GPU rounds."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", CHECK_KERNEL, "cpu", "float32"], env=environment, check=True)


@pytest.mark.gpu
def test_the_kernel_is_its_plain_twin_on_a_gpu():
    subprocess.run([sys.executable, "-c", CHECK_KERNEL, "cuda:0", "float32", "bfloat16"], check=True)


# --- models ---


def adapted(folder, kind, dtype="float32", *, targets=("all-linear",), seed=3):
    model = load_model(str(folder), CPU, dtype=dtype, quantization=kind)
    return model.adapted("actor", numbers_in(new_adapter(model.module, Settings(rank=4, alpha=8.0), targets, seed)))


def numbers_in(adapter, seed=3):
    """The adapter with an `up` that is not zero."""
    layers = {name: Pair(pair.down, random(*pair.up.shape, seed=seed) * 15) for name, pair in adapter.layers.items()}
    return Adapter(adapter.settings, layers)


@torch.no_grad()
def logits(model):
    layout = PackedLayout([Span(0, len(IDS), ())], CPU, model.dtype)
    hidden = model.hidden(torch.tensor([IDS]), torch.arange(len(IDS))[None], layout)
    return model.head.logits(hidden, 1.0)


@BOTH
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_linear_layers_below_the_head_are_quantised_and_nothing_else(tiny_architecture, kind, architecture):
    folder = tiny_architecture(architecture)
    plain = load(folder, "float32")
    model = load_model(str(folder), CPU, dtype="float32", quantization=kind)
    layers = linear_layers(plain.module)
    assert linear_layers(model.module).keys() == layers.keys()
    quantised = {name for name, module in model.module.named_modules() if isinstance(module, QuantisedLinear)}
    assert quantised == set(layers)
    before, after = plain.module.state_dict(), model.module.state_dict()
    rest = {name for name in before if name.removesuffix(".weight") not in layers}
    assert "lm_head.weight" in rest
    assert all(torch.equal(before[name], after[name]) for name in rest)
    exact = logits(plain)
    with torch.no_grad():
        for name, layer in layers.items():
            layer.weight.copy_(plain_weight(model.module.get_submodule(name)))
    assert torch.equal(logits(plain), logits(model))
    assert 1e-4 < (logits(plain) - exact).abs().max() < 1


@pytest.mark.invariant
@BOTH
def test_rollout_and_trainer_agree_to_the_last_bit(tiny_model, kind):
    model = adapted(tiny_model, kind)
    prompts = [tuple(IDS[: 4 + 9 * number]) for number in range(3)]
    engine = Engine(model, slots=5, max_length=64)
    requests = [GroupRequest(prompt=prompt, seeds=(1, 2, 3, 4)) for prompt in prompts]
    stage = rollouts_of(prompts, engine.generate(requests, Sampling(max_tokens=9)))
    for limits in (Limits(max_tokens=4096), Limits(max_tokens=64, share_prefix=False)):
        trained = stage_logprobs(stage, [torch.arange(len(stage.responses))], model, limits, 1.0)
        assert torch.equal(trained[stage.mask_NT], stage.rollout_logprobs_NT.to(trained.dtype)[stage.mask_NT])


@pytest.mark.invariant
def test_three_roles_on_one_base_with_and_without_recompute(tiny_model):
    stage, limits = make_rollouts(), Limits(max_tokens=4096)

    def trained(recompute):
        actor = adapted(tiny_model, "nf4", "float64")
        reference = replace(actor, adapter=None)
        made = new_adapter(actor.module, Settings(rank=2, alpha=2.0), ["q_proj"], seed=9)
        critic = add_value_head(actor.adapted("critic", numbers_in(made)))
        with torch.no_grad():
            critic.weight.fill_(0.1)
        if recompute:
            recompute_layers(actor.layers)
        for packed, _ in micro_batches(stage, actor, limits):
            actor.logprobs(packed, temperature=1.0)[0].sum().backward()
            critic.values(packed).square().sum().backward()
        base = load_model(str(tiny_model), CPU, dtype="float64", quantization="nf4")
        assert torch.equal(logits(reference), logits(base))
        return [parameter.grad for _, parameter in [*actor.named_parameters(), *critic.named_parameters()]]

    kept, recomputed = trained(False), trained(True)
    assert len(kept) == 28 + 4 + 2
    assert all(torch.equal(one, other) and one.abs().max() > 0 for one, other in zip(kept, recomputed, strict=True))


def test_a_critic_of_its_own_is_quantised_too(tiny_model):
    trunk = load_trunk(str(tiny_model), CPU, dtype="float32", quantization="int8")
    assert trunk.quantization == "int8"
    assert len([m for m in trunk.module.modules() if isinstance(m, QuantisedLinear)]) == 14


@BOTH
def test_what_is_saved_loads_quantised_again(tiny_model, tmp_path, kind):
    model = adapted(tiny_model, kind)
    model.save(tmp_path / "adapter")
    again = load_model(str(tmp_path / "adapter"), CPU)
    assert again.quantization == kind
    before, after = model.module.state_dict(), again.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    ("note", "message"),
    [('{"quantization": "nf3"}', r"quantization = nf3 is not known here"), ("[]", r"ullage.json is damaged")],
)
def test_a_note_that_is_not_known(tiny_model, tmp_path, note, message):
    adapted(tiny_model, "nf4", targets=["q_proj"]).save(tmp_path)
    assert (tmp_path / "ullage.json").read_text() == '{"quantization": "nf4"}\n'
    (tmp_path / "ullage.json").write_text(note)
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path), CPU)


@BOTH
def test_merged_weights_are_a_plain_model_with_the_same_logits(tiny_model, tmp_path, kind):
    model = adapted(tiny_model, kind, targets=["q_proj", "up_proj"])
    model.save_merged(tmp_path / "merged")
    before, after = (load_file(place / "model.safetensors") for place in (tiny_model, tmp_path / "merged"))
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in after.items()}
    assert {value.dtype for value in after.values()} == {torch.float32}
    name = "model.layers.1.self_attn.k_proj"  # has no adapter
    assert torch.equal(after[f"{name}.weight"], plain_weight(model.module.get_submodule(name)))
    assert (logits(load(tmp_path / "merged", "float32")) - logits(model)).abs().max() <= NEAR
