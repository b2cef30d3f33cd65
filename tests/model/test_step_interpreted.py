"""The optimizer's Triton kernel against the rules in plain torch, under Triton's interpreter (`make triton`)."""

import os
from importlib.util import find_spec

import pytest
import torch

from ullage.base.communicator import Solo
from ullage.config.tree import Optim
from ullage.engine.optimizer import Levers, Optimizer
from ullage.engine.rules import (
    SGD,
    SMALLEST_IN_8_BITS,
    AdamW,
    AdamW8bit,
    Hyper,
    Place,
    round_by_thresholds_,
    round_stochastically_,
    step_fused_,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [pytest.mark.triton, pytest.mark.skipif(not INTERPRETED, reason="`make triton` runs it, where Triton is")]

ODD = SMALLEST_IN_8_BITS + 1003
"""The last block is not full, nor is the last program."""
STEPS = 3
THRESHOLDS = 11
"""Their seed."""


@pytest.fixture(autouse=True)
def exact_roots(monkeypatch):
    """A CPU's own, from MKL, are wrong in a last bit here and there."""
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: x.double().pow(0.5).float())
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda x: x.copy_(x.double().pow(0.5)))


def random(step, count, dtype):
    values = torch.randn(count, generator=torch.Generator().manual_seed(step))
    values[300:600] = 0  # a block without gradients, but for the first steps
    return values.mul_(torch.logspace(-4, 1, count)).to(dtype)


def hyper(step, weight_decay, rate=2.0**-7):
    return Hyper(learning_rate=rate, betas=(0.9, 0.995), eps=1e-8, weight_decay=weight_decay, step=step)


class Case:
    """One parameter's weights and state."""

    def __init__(self, rule, count, *, master):
        self.rule = rule(torch.float32)
        self.weights = (random(0, count, torch.float32) + 0.1).bfloat16()
        self.master = self.weights.float() if master else None
        kinds = self.rule.state(count)
        self.kinds = kinds
        self.state = {name: torch.zeros(kind.entries(count), dtype=kind.dtype) for name, kind in kinds.items()}

    def plain(self, gradient, numbers, scale, seed):
        wide = gradient.float() * scale
        work = self.weights.float() if self.master is None else self.master
        self.rule.step_(work, wide, self.state, numbers, Place(seed, 0))
        if self.master is None:
            round_stochastically_(self.weights, work, Place(seed, 0))
        else:
            round_by_thresholds_(self.weights, work, Place(THRESHOLDS, 0))

    def fused(self, gradient, numbers, scale, seed, piece=1 << 20):
        for start in range(0, len(self.weights), piece):
            end = min(start + piece, len(self.weights))
            part = {
                name: self.state[name][start // kind.elements : kind.entries(end)] for name, kind in self.kinds.items()
            }
            master = None if self.master is None else self.master[start:end]
            places = Place(seed, start), Place(THRESHOLDS, start)
            step_fused_(self.weights[start:end], master, gradient[start:end], part, numbers, *places, scale=scale)

    def tensors(self):
        return {"weights": self.weights, **self.state} | ({} if self.master is None else {"master": self.master})


def differing(one, other):
    return [name for name, tensor in one.tensors().items() if not torch.equal(tensor, other.tensors()[name])]


@pytest.mark.parametrize("master", [False, True], ids=["rounded", "master"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("scale", "dtype"), [(1.0, torch.bfloat16), (0.3, torch.bfloat16), (0.3, torch.float32)])
def test_8_bit_steps_are_the_rules_bit_for_bit(scale, dtype, decay, master):
    got, want = (Case(AdamW8bit, ODD, master=master) for _ in range(2))
    assert got.state["exp_avg"].dtype == torch.int8
    for step in range(1, STEPS + 1):
        gradient = random(step, ODD, dtype)
        got.fused(gradient, hyper(step, decay), scale, step)
        want.plain(gradient, hyper(step, decay), scale, step)
        assert differing(got, want) == [], step
        assert torch.equal(gradient, random(step, ODD, dtype))
    assert got.state["exp_avg_sq"].unique().numel() > 200


@pytest.mark.parametrize("master", [False, True], ids=["rounded", "master"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_sgd_is_the_rule_bit_for_bit(scale, master):
    """Rate and scale are powers of two, so that a product rounds nothing and torch's fused addition adds nothing."""
    got, want = (Case(SGD, 1003, master=master) for _ in range(2))
    for step in range(1, STEPS + 1):
        gradient = random(step, 1003, torch.bfloat16)
        got.fused(gradient, hyper(step, 0.1), scale, step)
        want.plain(gradient, hyper(step, 0.1), scale, step)
        assert differing(got, want) == [], step


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_adamw_with_a_master_is_torchs_but_for_last_bits(scale, decay):
    got, want = (Case(AdamW, 1003, master=True) for _ in range(2))
    for step in range(1, STEPS + 1):
        gradient = random(step, 1003, torch.bfloat16)
        got.fused(gradient, hyper(step, decay), scale, step)
        want.plain(gradient, hyper(step, decay), scale, step)
    # Relative to what was added up: a moment may be small because its parts cancel.
    largest = torch.stack([random(step, 1003, torch.bfloat16).float().abs() for step in range(1, STEPS + 1)]).amax(0)
    assert ((got.state["exp_avg"] - want.state["exp_avg"]).abs() <= 2**-22 * largest).all()
    torch.testing.assert_close(got.state["exp_avg_sq"], want.state["exp_avg_sq"], rtol=2**-21, atol=0)
    moved = STEPS * 2.0**-7
    assert ((got.master - want.master).abs() <= 2**-22 * (want.master.abs() + 8 * moved)).all()
    rounded = torch.empty_like(got.weights)
    round_by_thresholds_(rounded, got.master, Place(THRESHOLDS, 0))
    assert torch.equal(got.weights, rounded)
    assert not torch.equal(rounded, got.master.bfloat16())


def test_adamw_without_a_master_rounds_what_a_master_would_be():
    """The first step from weights that bfloat16 and float32 both hold."""
    rounded, wide = Case(AdamW, 1003, master=False), Case(AdamW, 1003, master=True)
    wide.master = rounded.weights.float()
    gradient = random(1, 1003, torch.bfloat16)
    for case in (rounded, wide):
        case.fused(gradient, hyper(1, 0.1), 0.3, 1)
    want = torch.empty_like(rounded.weights)
    round_stochastically_(want, wide.master, Place(1, 0))
    assert torch.equal(rounded.weights, want)
    assert torch.equal(rounded.state["exp_avg"], wide.state["exp_avg"])
    assert not torch.equal(want, wide.master.bfloat16())


@pytest.mark.parametrize("master", [False, True], ids=["rounded", "master"])
@pytest.mark.parametrize("rule", [AdamW, AdamW8bit, SGD])
def test_results_do_not_depend_on_how_a_parameter_is_divided(rule, master):
    whole, parts = (Case(rule, ODD, master=master) for _ in range(2))
    for step in range(1, STEPS + 1):
        gradient = random(step, ODD, torch.bfloat16)
        whole.fused(gradient, hyper(step, 0.1), 0.3, step)
        parts.fused(gradient, hyper(step, 0.1), 0.3, step, piece=768)
    assert differing(whole, parts) == []


def test_nothing_beside_a_piece_is_touched():
    memory = torch.full((5, 700), 77.0).bfloat16()
    case = Case(SGD, 700, master=False)
    case.weights = memory[2]
    case.fused(random(1, 700, torch.bfloat16), hyper(1, 0.1), 1.0, 1)
    assert bool((memory[[0, 1, 3, 4]] == 77).all())
    assert not bool((memory[2] == 77).all())


def test_thresholds_repeat_as_in_plain_torch(monkeypatch):
    """Pieces that begin anywhere in a period, end in the next, or have several."""
    for module in ("ullage.engine.rules", "ullage.model.kernels.step_triton"):
        monkeypatch.setattr(f"{module}.PERIOD", 512)
    got, want = (Case(SGD, ODD, master=True) for _ in range(2))
    for step in range(1, STEPS + 1):
        gradient = random(step, ODD, torch.bfloat16)
        got.fused(gradient, hyper(step, 0.1), 1.0, step, piece=768 * step)
        want.plain(gradient, hyper(step, 0.1), 1.0, step)
    assert differing(got, want) == []


@pytest.mark.parametrize("master", [False, True], ids=["rounded", "master"])
def test_what_is_no_number_stays_none(master):
    case = Case(SGD, 600, master=master)
    target = case.weights if case.master is None else case.master
    target[100] = float("nan")
    if master:  # as CUDA makes it: a carry would make it zero
        target[101:356] = torch.full((255,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    case.fused(torch.zeros(600), hyper(1, 0.0), 1.0, 1)
    assert case.weights.isnan().nonzero().flatten().tolist() == list(range(100, 356 if master else 101))


def test_bits_of_keys_beyond_31_bits():
    """Random words wrap around: sums of a place and a key are taken modulo 2**32."""
    case, other = (Case(SGD, 600, master=False) for _ in range(2))
    gradient = random(1, 600, torch.bfloat16)
    for seed in range(40):  # half of the keys have their highest bit set
        case.fused(gradient, hyper(1, 0.1), 1.0, seed)
        other.plain(gradient, hyper(1, 0.1), 1.0, seed)
    assert differing(case, other) == []


@pytest.mark.parametrize("levers", [Levers(rounding="stochastic"), Levers(rounding="stochastic", state="streamed")])
def test_an_optimizers_own_steps_clipped(levers):
    def trained(fused):
        weights = torch.nn.Parameter(random(0, ODD, torch.bfloat16))
        optimizer = Optimizer([("weight", weights)], Optim(optimizer="adamw_8bit"), levers, seed=3, piece=1024)
        optimizer._fused = fused
        for step in range(1, STEPS + 1):
            weights.grad.copy_(random(step, ODD, torch.bfloat16))
            assert optimizer.step(2.0**-7, Solo()) > 1
        return optimizer.tensors() | {"weights": weights.detach()}

    got, want = trained(True), trained(False)
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
