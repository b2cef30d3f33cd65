"""Update rules against torch and hand-computed numbers, 8-bit codes and their errors, stochastic rounding."""

import math

import pytest
import torch

from ullage.base.seeds import derive
from ullage.engine.rules import (
    SGD,
    AdamW,
    AdamW8bit,
    Hyper,
    Place,
    decode,
    encode,
    round_by_thresholds_,
    round_stochastically_,
)

CPU = torch.empty(0)
"""Where bits are made."""
HYPER = Hyper(learning_rate=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=1)


def at(step, **changes):
    values = {name: getattr(HYPER, name) for name in HYPER.__slots__} | {"step": step} | changes
    return Hyper(**values)


def make_state(rule, numel):
    return {name: torch.zeros(kind.entries(numel), dtype=kind.dtype) for name, kind in rule.state(numel).items()}


# --- random bits and rounding ---


def expected_bits(seed, purpose, place):
    mask = 0xFFFFFFFF
    key = derive(seed, purpose)
    x = (place + (key & mask)) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = (((x ^ (x >> 15)) + (key >> 31)) * 0x846CA68B) & mask
    return (x ^ (x >> 16)) & 0xFFFF


def test_bits_are_those_of_the_hash():
    for seed in (0, 7, derive("another")):
        got = Place(seed, 1000).bits(70, "rounding", CPU)
        assert got.tolist() == [expected_bits(seed, "rounding", 1000 + i) for i in range(70)]


def test_bits_belong_to_a_place_and_a_purpose():
    whole = Place(5, 0).bits(3000, "rounding", CPU)
    parts = [Place(5, start).bits(size, "rounding", CPU) for start, size in ((0, 256), (256, 1024), (1280, 1720))]
    assert torch.equal(torch.cat(parts), whole)
    assert (Place(5, 0).bits(3000, "exp_avg", CPU) == whole).sum() < 5
    assert (Place(6, 0).bits(3000, "rounding", CPU) == whole).sum() < 5


def test_bits_are_uniform_and_independent_of_neighbours_and_steps():
    count = 1 << 18
    streams = [Place(seed, 0).bits(count, "rounding", CPU).double() / 65536 - (0.5 - 2**-17) for seed in range(4)]
    error = math.sqrt(1 / 12 / count)
    for stream in streams:
        assert abs(stream.mean()) < 4 * error
        assert abs(stream.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / count)
    pairs = [(streams[0], streams[1]), (streams[2], streams[3]), (streams[0][1:], streams[0][:-1])]
    for one, other in pairs:
        assert abs((one * other).mean()) < 4 / 12 / math.sqrt(count)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.97])
def test_rounding_is_unbiased_over_seeds(sign, share):
    # Between 1 and the next bfloat16, 1 + 2**-7.
    wide = torch.full((16,), sign * (1 + share * 2**-7))
    rounds = 2000
    results = torch.empty(rounds, 16, dtype=torch.bfloat16)
    for seed in range(rounds):
        round_stochastically_(results[seed], wide, Place(seed, 0))
    assert set(results.flatten().tolist()) == {sign * 1.0, sign * (1 + 2**-7)}
    error = 2**-7 * math.sqrt(share * (1 - share) / results.numel())
    assert abs(results.double().mean() - wide[0].double()) < 4 * error


def test_what_bfloat16_holds_is_never_changed():
    wide = torch.tensor([0.0, -0.0, 1.0, -1.5, 3e38, 1e-40, math.inf, -math.inf]).bfloat16().float()
    narrow = torch.empty(8, dtype=torch.bfloat16)
    for seed in range(50):
        round_stochastically_(narrow, wide, Place(seed, 0))
        assert torch.equal(narrow.view(torch.int16), wide.bfloat16().view(torch.int16))


# --- AdamW and SGD ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("piece", [256, 1 << 20])
def test_adamw_is_torchs_fused_kernel_bit_for_bit(dtype, piece):
    generator = torch.Generator().manual_seed(1)
    ours = torch.randn(1003, generator=generator, dtype=dtype)
    theirs = torch.nn.Parameter(ours.clone())
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, fused=True)
    rule = AdamW(dtype)
    state = make_state(rule, 1003)
    for step in range(1, 6):
        gradient = torch.randn(1003, generator=generator, dtype=dtype)
        theirs.grad = gradient.clone()
        reference.step()
        for start in range(0, 1003, piece):
            part = slice(start, start + piece)
            rule.step_(ours[part], gradient[part], {k: v[part] for k, v in state.items()}, at(step), Place(0, start))
    assert torch.equal(ours, theirs.detach())
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[name], reference.state[theirs][name])


def test_sgd_by_hand():
    work, gradient = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 8.0])
    SGD(torch.float32).step_(work, gradient, {}, at(1, learning_rate=0.25, weight_decay=0.5), Place(0, 0))
    # 1 * (1 - 0.125) - 0.25 * 4 and -2 * 0.875 - 0.25 * 8
    assert work.tolist() == [-0.125, -3.75]
    assert gradient.tolist() == [4.0, 8.0]


# --- 8-bit moments ---


def coded(values, dtype, seed=0):
    codes = torch.zeros(len(values), dtype=dtype)
    scales = torch.zeros(-(-len(values) // 256))
    encode(values, codes, scales, Place(seed, 0).bits(len(values), "test", CPU))
    return codes, scales


def test_codes_by_hand():
    # Shares of the largest, 2: 1, (127/255)**4, 0, and half of the smallest step, which may not become 0.
    values = torch.tensor([2.0, 2 * (127 / 255) ** 4, 0.0, (1 / 255) ** 4])
    codes, scales = coded(values, torch.uint8)
    assert codes.tolist() == [255, 127, 0, 1]
    assert scales.tolist() == [2.0]
    smallest = 2 * (1 / 255) ** 4
    assert decode(codes, scales).tolist() == pytest.approx([2.0, 2 * (127 / 255) ** 4, 0.0, smallest], rel=1e-6)
    signed, scales = coded(torch.tensor([-3.0, 3 * (64 / 127) ** 4, 0.0]), torch.int8)
    assert (signed.tolist(), scales.tolist()) == ([-127, 64, 0], [3.0])
    assert decode(signed, scales).tolist() == pytest.approx([-3.0, 3 * (64 / 127) ** 4, 0.0], rel=1e-6)


@pytest.mark.parametrize(("dtype", "top"), [(torch.int8, 127), (torch.uint8, 255)])
def test_every_code_is_its_own_value(dtype, top):
    codes = torch.arange(-top if dtype == torch.int8 else 0, top + 1).to(dtype)
    scales = torch.full((-(-len(codes) // 256),), 0.37)
    values = decode(codes, scales)
    assert (values.diff() > 0).all()
    for seed in range(20):
        again, new_scales = coded(values, dtype, seed)
        assert torch.equal(again, codes)
        assert new_scales.tolist() == pytest.approx([0.37] * len(scales), rel=1e-6)


def test_error_is_below_the_distance_of_two_codes():
    """At the code c the distance is about 4 / c of the value: 1.6 % at the top, 3 % at a share of a tenth."""
    values = torch.logspace(-6, 0, 1024, dtype=torch.float64).float()
    scales = values.view(4, 256).amax(1)
    codes, got_scales = coded(values, torch.uint8)
    assert torch.equal(scales, got_scales)
    share = (values.view(4, 256) / scales[:, None]).double().flatten()
    low = (share**0.25 * 255).floor().clamp(max=254)
    distance = ((low + 1) / 255) ** 4 - (low / 255) ** 4
    error = (decode(codes, got_scales).view(4, 256) / scales[:, None]).double().flatten() - share
    assert (error.abs() <= distance * (1 + 1e-4)).all()
    assert (error[share > 0.1].abs() / share[share > 0.1]).max() < 0.0285
    assert (error[share > 0.5].abs() / share[share > 0.5]).max() < 0.0190


def test_codes_are_unbiased():
    values = torch.tensor([1.0, 0.3, -0.05, 0.002, -1e-7])
    total = torch.zeros(5, dtype=torch.float64)
    rounds = 3000
    for seed in range(rounds):
        total += decode(*coded(values, torch.int8, seed)).double()
    root = values.abs().double() ** 0.25 * 127
    low, high = (root.floor() / 127) ** 4, (root.ceil() / 127) ** 4
    error = ((values.abs() - low) * (high - values.abs())).clamp(min=0).sqrt() / math.sqrt(rounds)
    assert ((total / rounds - values).abs() <= 4 * error + 1e-7 * values.abs()).all()


def test_a_block_is_not_touched_by_another():
    values = torch.cat([torch.full((256,), 1e-6), torch.full((256,), 1e6), torch.zeros(10)])
    codes, scales = coded(values, torch.int8)
    assert scales.tolist() == pytest.approx([1e-6, 1e6, 0.0])
    assert torch.equal(decode(codes, scales), values)


def test_small_parameters_keep_float32_moments():
    rule = AdamW8bit(torch.float32)
    assert {kind.dtype for kind in rule.state(4095).values()} == {torch.float32}
    kinds = {name: (kind.dtype, kind.entries(5000)) for name, kind in rule.state(5000).items()}
    assert kinds == {
        "exp_avg": (torch.int8, 5000),
        "exp_avg_scale": (torch.float32, 20),
        "exp_avg_sq": (torch.uint8, 5000),
        "exp_avg_sq_scale": (torch.float32, 20),
    }


def test_the_second_moment_follows_gradients_that_change():
    """Half of a block grows threefold: round-to-nearest codes would keep the other half's share, and freeze it."""
    rule = AdamW8bit(torch.float32)
    state = make_state(rule, 4096)
    exact = torch.zeros(4096, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    size = torch.ones(4096)
    for step in range(1, 2001):
        if step == 601:
            size[::2] = 3.0
        gradient = torch.randn(4096, generator=generator) * size
        exact.mul_(0.995).add_(gradient.double() ** 2, alpha=0.005)
        rule.step_(torch.zeros(4096), gradient, state, at(step, betas=(0.9, 0.995)), Place(step, 0))
    ratio = decode(state["exp_avg_sq"], state["exp_avg_sq_scale"]) / exact
    assert ratio[::2].mean() == pytest.approx(1, abs=0.02)
    assert ratio[1::2].mean() == pytest.approx(1, abs=0.02)


def test_training_in_8_bits_ends_where_float32_does():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(256, 64, generator=generator)
    targets = torch.tanh(inputs @ torch.randn(64, 8, generator=generator) / 4)
    start = [torch.randn(64, 80, generator=generator) / 8, torch.randn(80, 64, generator=generator) / 9]
    head = torch.randn(64, 8, generator=generator) / 8
    losses = {}
    for kind in (AdamW, AdamW8bit):
        rule = kind(torch.float32)
        layers = [layer.clone().requires_grad_() for layer in start]
        states = [make_state(rule, layer.numel()) for layer in layers]
        for step in range(1, 201):
            loss = ((torch.tanh(torch.tanh(inputs @ layers[0]) @ layers[1]) @ head - targets) ** 2).mean()
            gradients = torch.autograd.grad(loss, layers)
            for place, (layer, gradient) in enumerate(zip(layers, gradients, strict=True)):
                hyper = at(step, learning_rate=3e-3, weight_decay=0.0)
                flat = layer.detach().view(-1)
                rule.step_(flat, gradient.flatten(), states[place], hyper, Place(derive(step, place), 0))
        losses[kind] = loss.item()
    assert losses[AdamW] < 0.02
    assert losses[AdamW8bit] == pytest.approx(losses[AdamW], rel=0.05)


def test_thresholds_of_rows_are_their_own():
    """As wide as matrices are: rows that were rounded alike would be wrong alike."""
    wide = torch.full((40, 4096), 1 + 0.3 * 2**-7)
    narrow = torch.empty_like(wide, dtype=torch.bfloat16)
    round_by_thresholds_(narrow.view(-1), wide.view(-1), Place(3, 0))
    moved = (narrow > 1).double()
    assert abs(moved.mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / moved.numel())
    rows = moved - moved.mean(1, keepdim=True)
    alike = torch.corrcoef(rows).fill_diagonal_(0).abs().max()
    assert alike < 5 / math.sqrt(4096)


def test_any_piece_of_a_parameter_is_rounded_as_the_whole():
    wide = torch.randn(150_000, generator=torch.Generator().manual_seed(2))
    whole, parts = (torch.empty(150_000, dtype=torch.bfloat16) for _ in range(2))
    round_by_thresholds_(whole, wide, Place(4, 0))
    assert not torch.equal(whole, wide.bfloat16())
    for start, end in ((0, 7), (7, 65521), (65521, 65530), (65530, 150_000)):
        round_by_thresholds_(parts[start:end], wide[start:end], Place(4, start))
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("rounded_", [round_by_thresholds_, round_stochastically_])
def test_what_is_no_number_stays_none(rounded_):
    narrow = torch.zeros(256, dtype=torch.bfloat16)
    rounded_(narrow, torch.full((256,), math.inf) - math.inf, Place(1, 0))
    assert narrow.isnan().all()
    rounded_(narrow, torch.full((256,), math.nan), Place(1, 0))
    assert narrow.isnan().all()
    for from_a_gpu in (0x7FFFFFFF, -1):  # all bits set, which must not carry into the sign
        rounded_(narrow, torch.full((256,), from_a_gpu, dtype=torch.int32).view(torch.float32), Place(1, 0))
        assert narrow.isnan().all()
    infinite = torch.tensor([math.inf, -math.inf]).repeat(64)
    rounded_(narrow[:128], infinite, Place(1, 0))
    assert torch.equal(narrow[:128].float(), infinite)
