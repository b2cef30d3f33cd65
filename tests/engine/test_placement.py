"""State on the device, streamed and on the host: the same weights and moments bit for bit, through fixed buffers."""

import pytest
import torch

from ullage.base.communicator import Solo
from ullage.config.tree import Optim
from ullage.engine import placement
from ullage.engine.optimizer import Levers, Optimizer

SHAPES = ((70, 131), (7,), (5, 1024), (4096,), (3000,))
"""Some divided into pieces, some with a tail, some with moments in 8 bits."""


def train(dtype, rule, piece=1 << 22, steps=5, **levers):
    """Five steps of two micro-batches; the weights, the checkpoint and the norms."""
    generator = torch.Generator().manual_seed(0)
    named = [(f"p{i}", torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype))) for i, s in enumerate(SHAPES)]
    config = Optim(lr=1e-2, optimizer=rule, weight_decay=0.1)
    optimizer = Optimizer(named, config, Levers(**levers), seed=3, piece=piece)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for _, p in named).backward()
        norms.append(optimizer.step(1e-2, Solo()))
    return optimizer, torch.cat([p.detach().flatten() for _, p in named]), norms


def assert_same(one, other):
    assert one[2] == other[2]
    assert torch.equal(one[1], other[1])
    mine, theirs = one[0].tensors(), other[0].tensors()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


KINDS = [
    (torch.float32, "adamw", "master"),
    (torch.float32, "adamw_8bit", "master"),
    (torch.float32, "sgd", "master"),
    (torch.float64, "adamw", "master"),
    (torch.bfloat16, "adamw", "master"),
    (torch.bfloat16, "adamw_8bit", "master"),
    (torch.bfloat16, "sgd", "master"),
    (torch.bfloat16, "adamw", "stochastic"),
    (torch.bfloat16, "adamw_8bit", "stochastic"),
    (torch.bfloat16, "sgd", "stochastic"),
    (torch.float16, "adamw", "master"),
]


@pytest.mark.invariant
@pytest.mark.parametrize(("dtype", "rule", "rounding"), KINDS)
def test_five_steps_are_the_same_wherever_state_and_gradients_are(dtype, rule, rounding):
    plain = {
        gradients: train(dtype, rule, gradients=gradients, rounding=rounding) for gradients in ("weights", "float32")
    }
    plain["host"] = plain["weights"]
    assert plain["weights"][2][0] > 1  # clipped
    assert (plain["weights"][2] == plain["float32"][2]) == (dtype in (torch.float32, torch.float64))
    for state in ("device", "streamed", "host"):
        if state == "host" and (rule == "adamw_8bit" or rounding == "stochastic"):
            continue
        for gradients, want in plain.items():
            assert_same(want, train(dtype, rule, 768, state=state, gradients=gradients, rounding=rounding))
    for piece in (256, 4096):
        assert_same(plain["weights"], train(dtype, rule, piece, rounding=rounding))


@pytest.mark.parametrize("state", ["streamed", "host"])
def test_stages_are_allocated_once_and_hold_two_pieces(state, monkeypatch):
    allocated = []

    def counted(numel, dtype, device, allocate=placement.host_buffer, **kind):
        allocated.append(numel)
        return allocate(numel, dtype, device, **kind)

    monkeypatch.setattr(placement, "host_buffer", counted)
    optimizer, *_ = train(torch.bfloat16, "adamw", 1024, steps=1, state=state)
    stages = optimizer._placement._stages
    before = [room.data_ptr() for stage in stages for room in stage._room.values()]
    count = len(allocated)
    for _ in range(3):
        optimizer.gradient.fill_(1e-3)
        optimizer.step(1e-2, Solo())
    assert [room.data_ptr() for stage in stages for room in stage._room.values()] == before
    assert len(allocated) == count == (0 if state == "streamed" else 5), "four rooms, and one for a wide gradient"
    sizes = [{name: len(room) for name, room in stage._room.items()} for stage in stages]
    if state == "streamed":
        assert sizes == 2 * [{"exp_avg": 4096, "exp_avg_sq": 4096, "master": 4096}]
    else:
        assert sizes == 2 * [{"weights": 2048, "gradient": 2048}]


def test_bytes_are_counted_where_they_are():
    total = 9170 + 7 + 5120 + 4096 + 3000
    piece = {"piece": 1024, "steps": 0}
    streamed, *_ = train(torch.bfloat16, "adamw", state="streamed", **piece)
    # Two stages of three float32 tensors.
    assert streamed.nbytes() == {"gradients": total * 2, "optimizer": 2 * 3 * 4096, "master": 0}
    assert streamed.host_nbytes() == {"gradients": 0, "optimizer": total * 8, "master": total * 4}
    host, *_ = train(torch.float32, "adamw", state="host", **piece)
    assert host.nbytes() == {"gradients": total * 4, "optimizer": 0, "master": 0}
    # Two stages for gradients and weights.
    assert host.host_nbytes() == {"gradients": 0, "optimizer": total * 8 + 2 * 2 * 4096, "master": total * 4}
    away, *_ = train(torch.bfloat16, "sgd", gradients="host", rounding="stochastic", **piece)
    assert away.nbytes() == {"gradients": 0, "optimizer": 2 * 2048, "master": 0}
    assert away.host_nbytes() == {"gradients": total * 2 + 4 * 9170 * 2, "optimizer": 0, "master": 0}
    small, *_ = train(torch.bfloat16, "adamw_8bit", rounding="stochastic", steps=0)
    coded, blocks = 9170 + 5120 + 4096, 36 + 20 + 16
    assert small.nbytes()["optimizer"] == 2 * (coded + 4 * blocks) + 8 * (7 + 3000)


def test_weights_that_have_been_away_are_stepped_where_they_are_now():
    ours, theirs = (train(torch.float32, "adamw", 256, steps=2) for _ in range(2))
    for p in ours[0].parameters:
        p.data = p.data.clone()  # as an offloaded role's weights come back
    for optimizer, *_ in (ours, theirs):
        optimizer.gradient.fill_(0.5)
        optimizer.step(1e-2, Solo())
    for one, other in zip(ours[0].parameters, theirs[0].parameters, strict=True):
        assert torch.equal(one, other)
