"""The optimizer's kernel on a CUDA device against plain torch, and wherever its state lives. Run: make gpu."""

import pytest
import torch

from ullage.base.communicator import Solo
from ullage.base.seeds import derive
from ullage.config.tree import Optim
from ullage.engine.optimizer import Levers, Optimizer
from ullage.engine.rules import AdamW8bit, Hyper, Place, round_by_thresholds_, step_fused_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = (1_000_003, 3 << 12, 700)
"""One with a last block that is not full, one of whole blocks, one whose moments are never in 8 bits."""
STEPS = 5
RATE = 2.0**-10
"""A power of two: plain SGD multiplies and adds with one rounding."""


def random(step, size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(step * 7 + size))
    return values.mul_(torch.logspace(-4, 1, size)).bfloat16()


@pytest.fixture
def clipped(monkeypatch):
    """The same norm on every device, and a scale of the gradients that is a power of two."""
    monkeypatch.setattr("ullage.engine.optimizer.global_norm", lambda gradient: 4 - 1e-6)


def trained(rule, levers, device="cuda", fused=None, piece=4096):
    parameters = [
        (f"p{place}", torch.nn.Parameter((random(0, size) + 0.1).bfloat16().to(device)))
        for place, size in enumerate(SIZES)
    ]
    optimizer = Optimizer(parameters, Optim(optimizer=rule, weight_decay=0.1), levers, seed=3, piece=piece)
    if fused is None:
        assert optimizer._fused == (device == "cuda" and levers.state != "host")
    else:
        optimizer._fused = fused
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        sum((p * random(step, p.numel()).to(device)).sum() for _, p in parameters).backward()
        optimizer.step(RATE, Solo())
    state = {name: tensor.cpu() for name, tensor in optimizer.tensors().items()}
    return state | {name: p.detach().cpu() for name, p in parameters}


def differing(got, want):
    return [name for name in want if not torch.equal(got[name], want[name])]


@pytest.mark.usefixtures("clipped")
@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_8_bit_steps_are_plain_torchs_bit_for_bit(rounding, monkeypatch):
    got = trained("adamw_8bit", Levers(rounding=rounding))
    same = trained("adamw_8bit", Levers(rounding=rounding), fused=False)
    # A CPU's own roots, from MKL, are wrong in a last bit here and there.
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: x.double().pow(0.5).float())
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda x: x.copy_(x.double().pow(0.5)))
    want = trained("adamw_8bit", Levers(rounding=rounding), "cpu")
    # The smallest has float32 moments, and without the kernel torch's order of the formula.
    assert [name for name in differing(got, same) if not name.endswith("p2")] == []
    assert [name for name in differing(got, want) if not name.endswith("p2")] == []


@pytest.mark.usefixtures("clipped")
@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_sgd_is_plain_torchs_bit_for_bit(rounding):
    got = trained("sgd", Levers(rounding=rounding))
    assert differing(got, trained("sgd", Levers(rounding=rounding), fused=False)) == []


@pytest.mark.usefixtures("clipped")
@pytest.mark.parametrize("gradients", ["weights", "float32"])
def test_adamws_masters_are_torchs_but_for_last_bits(gradients):
    """Decay and step round twice each time, in either order of the formula: at most 4 x 2^-24 a step, and the factor
    of the decay once more. Those are 25 x 2^-24 after five steps."""
    got = trained("adamw", Levers(gradients=gradients))
    want = trained("adamw", Levers(gradients=gradients), fused=False)
    for name in ("p0", "p1", "p2"):
        one, other = got[f"master/{name}"], want[f"master/{name}"]
        assert ((one - other).abs() <= 25 * 2**-24 * (other.abs() + STEPS * RATE)).all(), name
        rounded = torch.empty_like(got[name])
        round_by_thresholds_(rounded, one, Place(derive(3, name), 0))
        assert torch.equal(got[name], rounded)


@pytest.mark.usefixtures("clipped")
def test_adamws_rounded_weights_are_torchs_but_for_few():
    """A last bit of float32 decides for one of 65,536 weights where it is rounded to."""
    levers = Levers(rounding="stochastic")
    got, want = trained("adamw", levers), trained("adamw", levers, fused=False)
    for name in ("p0", "p1", "p2"):
        assert (got[name] != want[name]).float().mean() < 2e-3, name


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit", "sgd"])
def test_state_may_live_anywhere(rule, rounding):
    want = trained(rule, Levers(rounding=rounding))
    assert differing(trained(rule, Levers(rounding=rounding, state="streamed")), want) == []
    assert differing(trained(rule, Levers(rounding=rounding, state="streamed"), piece=1 << 18), want) == []


@pytest.mark.usefixtures("clipped")
@pytest.mark.parametrize("state", ["device", "streamed"])
def test_gradients_may_wait_on_the_host(state):
    want = trained("adamw_8bit", Levers(rounding="stochastic"))
    assert differing(trained("adamw_8bit", Levers(rounding="stochastic", state=state, gradients="host")), want) == []


def test_a_step_allocates_nothing():
    size = (1 << 24) + 5
    weights, gradient = (torch.ones(size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    kinds = AdamW8bit(torch.float32).state(size)
    state = {name: torch.zeros(kind.entries(size), dtype=kind.dtype, device="cuda") for name, kind in kinds.items()}
    hyper = Hyper(learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step_fused_(weights, None, gradient, state, hyper, Place(0, 0), Place(1, 0), scale=0.5)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    assert (state["exp_avg"] == 127).all()
