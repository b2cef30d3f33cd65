"""When an optimizer's step is one kernel: chosen for bfloat16 on CUDA alone, and it allocates nothing there."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.base.communicator import Solo
from ullage.config.tree import Optim
from ullage.engine.optimizer import Levers, Optimizer
from ullage.engine.rules import Hyper, Place, step_fused_

KERNEL = "ullage.step.default"
VIEWS = {"aten.detach.default", "aten.view.default", "aten.view.dtype", "aten.slice.Tensor"}
SIZES = (9000, 700)


class Operations(TorchDispatchMode):
    """How often each was called."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def known_norm(monkeypatch):
    """`meta`, which stands for CUDA in a trace, has no numbers."""
    monkeypatch.setattr("ullage.engine.optimizer.global_norm", lambda gradient: 2.5)


def operations(rule, levers, dtype=torch.bfloat16, device="meta"):
    weights = [torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device)) for size in SIZES]
    optimizer = Optimizer(zip("ab", weights, strict=True), Optim(optimizer=rule), levers, piece=1024)
    with Operations() as seen:
        assert optimizer.step(1e-3, Solo()) == 2.5
    return seen.counts


def test_a_graph_notices_that_weights_have_changed():
    weights = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16, device="meta"))
    optimizer = Optimizer([("a", weights)], Optim())
    before = weights._version
    optimizer.step(1e-3, Solo())
    assert weights._version > before


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit", "sgd"])
@pytest.mark.parametrize("levers", [Levers(), Levers(rounding="stochastic"), Levers(gradients="float32")])
def test_a_step_on_the_device_is_one_kernel_for_each_parameter(rule, levers):
    counts = operations(rule, levers)
    assert counts[KERNEL] == 2
    assert counts.keys() - VIEWS == {KERNEL}


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("levers", [Levers(state="streamed"), Levers(gradients="host")])
def test_what_comes_from_the_host_is_stepped_in_pieces(rule, levers):
    counts = operations(rule, levers)
    assert counts[KERNEL] == 9 + 1
    assert counts.keys() - VIEWS == {KERNEL, "aten.copy_.default"}


@pytest.mark.parametrize(
    ("levers", "dtype", "device"),
    [
        (Levers(), torch.bfloat16, "cpu"),
        (Levers(rounding="stochastic"), torch.bfloat16, "cpu"),
        (Levers(), torch.float16, "meta"),
        (Levers(), torch.float32, "meta"),
        (Levers(state="host"), torch.bfloat16, "meta"),
    ],
)
def test_other_weights_and_steps_on_the_host_keep_plain_torch(levers, dtype, device):
    counts = operations("adamw", levers, dtype, device)
    assert counts[KERNEL] == 0
    assert counts["aten._fused_adamw_.default"] == 9 + 1


def test_what_the_kernel_is_told(monkeypatch):
    told = []
    monkeypatch.setattr("ullage.engine.rules.step_", lambda *arguments: told.append(arguments))
    hyper = Hyper(learning_rate=0.5, betas=(0.75, 0.5), eps=0.125, weight_decay=0.25, step=2)
    place = Place(7, 1 << 32)  # bits repeat after 2**32 elements
    weights, gradient, mean, square = torch.zeros(4, 256).unbind()
    places = place, Place(9, (1 << 32) + 3)
    step_fused_(weights, None, gradient, {"exp_avg": mean, "exp_avg_sq": square}, hyper, *places, scale=0.3)
    step_fused_(weights, mean, gradient, {"master": mean}, hyper, *places, scale=1.0)
    moments = [word for purpose in ("exp_avg", "exp_avg_sq") for word in Place(7, 0).words(purpose)]
    chance, thresholds = Place(7, 0).words("rounding"), Place(9, 0).words("thresholds")
    start = ((1 << 32) + 3) % 65521
    adamw, sgd = ([part for part in arguments if not isinstance(part, torch.Tensor)] for arguments in told)
    # 1 - 0.5 * 0.25; 0.5 / (1 - 0.75**2); 1 / (1 - 0.5**2)
    assert adamw == [
        None,
        None,
        None,
        0.3,
        0.875,
        0.5 / 0.4375,
        (0.75, 0.5),
        1 / 0.75,
        0.125,
        [*moments, *chance],
        start,
    ]
    assert sgd == [
        None,
        None,
        None,
        None,
        1.0,
        0.875,
        0.5,
        (0.75, 0.5),
        1 / 0.75,
        0.125,
        [*moments, *thresholds],
        start,
    ]
    assert [part.data_ptr() for part in told[0] if isinstance(part, torch.Tensor)] == [
        part.data_ptr() for part in (weights, gradient, mean, square)
    ]
    assert told[1][2] is mean
