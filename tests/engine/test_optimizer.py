"""The optimizer: torch's AdamW and clipping, in place, with flat buckets, a float32 master or stochastic rounding."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.base.communicator import Solo
from ullage.base.errors import ConfigError
from ullage.config.tree import Optim
from ullage.engine.optimizer import Levers, Optimizer, learning_rate

SHAPES = ((5, 3), (7,), (2, 2, 2))


def make_parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"layer.{i}", torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for i, shape in enumerate(SHAPES)
    ]


def give_gradient(parameters, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 + step)
    for _, parameter in parameters:
        parameter.grad.copy_(scale * torch.randn(parameter.shape, generator=generator))


def flat(parameters):
    return torch.cat([parameter.detach().double().flatten() for _, parameter in parameters])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-7), (torch.float64, 1e-14)])
@pytest.mark.parametrize("scale", [0.01, 3.0], ids=["below the clip", "clipped"])
def test_five_steps_equal_torch(dtype, tolerance, scale):
    config = Optim(lr=1e-2, weight_decay=0.1, clip_grad=1.0, betas=(0.8, 0.95), eps=1e-6)
    ours, theirs = make_parameters(dtype), make_parameters(dtype)
    optimizer = Optimizer(ours, config)
    reference = torch.optim.AdamW(
        [parameter for _, parameter in theirs], lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6
    )
    for step in range(5):
        rate = 1e-2 / (step + 1)
        optimizer.zero_grad()
        give_gradient(ours, step, scale)
        for _, parameter in theirs:
            parameter.grad = torch.zeros_like(parameter)
        give_gradient(theirs, step, scale)
        norm = optimizer.step(rate, Solo())
        want = torch.nn.utils.clip_grad_norm_([parameter for _, parameter in theirs], 1.0)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        assert norm == pytest.approx(want.item(), rel=1e-6)
        assert (norm > 1) == (scale == 3.0)
    assert (flat(ours) - flat(theirs)).abs().max() <= tolerance


def test_first_step_by_hand():
    # The first AdamW step moves by lr * sign(gradient) and decays by lr * weight_decay.
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = Optimizer([("weight", parameter)], Optim(lr=0.1, weight_decay=0.5, clip_grad=100.0, eps=1e-12))
    parameter.grad.copy_(torch.tensor([3.0, -4.0]))
    assert optimizer.step(0.1, Solo()) == 5.0
    assert parameter.tolist() == pytest.approx([1.0 * 0.95 - 0.1, -2.0 * 0.95 + 0.1], abs=1e-10)


def test_weights_never_move_and_gradients_are_views_of_one_bucket():
    parameters = make_parameters()
    addresses = [parameter.data_ptr() for _, parameter in parameters]
    optimizer = Optimizer(parameters, Optim())
    for step in range(3):
        optimizer.zero_grad()
        sum((parameter**2).sum() for _, parameter in parameters).backward()
        optimizer.step(1e-3, Solo())
        assert [parameter.data_ptr() for _, parameter in parameters] == addresses, step
        start = optimizer.gradient.data_ptr()
        for _, parameter in parameters:
            assert parameter.grad.data_ptr() == start
            start += parameter.grad.nbytes
    assert optimizer.gradient.numel() == 15 + 7 + 8


def test_zero_grad_clears_every_view():
    parameters = make_parameters()
    optimizer = Optimizer(parameters, Optim())
    give_gradient(parameters, 0)
    optimizer.zero_grad()
    assert all(parameter.grad.abs().sum() == 0 for _, parameter in parameters)


def test_frozen_parameters_are_left_out():
    parameters = make_parameters()
    parameters[1][1].requires_grad_(False)
    optimizer = Optimizer(parameters, Optim())
    assert optimizer.names == ("layer.0", "layer.2")
    assert parameters[1][1].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_gradient_changes_nothing(dtype, poison):
    parameters = make_parameters(dtype)
    optimizer = Optimizer(parameters, Optim(lr=1e-2))
    give_gradient(parameters, 0)
    optimizer.step(1e-2, Solo())
    weights = flat(parameters)
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    give_gradient(parameters, 1)
    parameters[1][1].grad[3] = poison
    assert not math.isfinite(optimizer.step(1e-2, Solo()))
    assert torch.equal(flat(parameters), weights)
    for name, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, state[name]), name


def test_bfloat16_with_a_master_loses_no_update():
    """300 steps of 1e-6 on weights near 1, where bfloat16's own spacing is 0.0078."""
    config = Optim(lr=1e-6, weight_decay=0.0, clip_grad=1e9)
    narrow = [("weight", torch.nn.Parameter(torch.tensor([1.0, -1.0, 0.5]).bfloat16()))]
    wide = [("weight", torch.nn.Parameter(torch.tensor([1.0, -1.0, 0.5])))]
    optimizers = [Optimizer(parameters, config) for parameters in (narrow, wide)]
    for _ in range(300):
        for (_, parameter), optimizer in zip(narrow + wide, optimizers, strict=True):
            parameter.grad.copy_(torch.tensor([1.0, -2.0, 0.5]))
            optimizer.step(1e-6, Solo())
    master = optimizers[0].tensors()["master/weight"]
    torch.testing.assert_close(master, wide[0][1].detach(), rtol=0, atol=1e-9)
    assert master.tolist() == pytest.approx([1 - 3e-4, -1 + 3e-4, 0.5 - 3e-4], abs=2e-5)
    # One of the two numbers of bfloat16 around it.
    spacing = torch.tensor([2**-8, 2**-8, 2**-9])
    assert ((narrow[0][1].detach() - master).abs() < spacing).all()


def moved_by_tiny_steps(rounding):
    """200 steps of 1e-6 on 4096 weights of 0.5, where bfloat16's own spacing is 0.002 below and 0.004 above."""
    weight = torch.nn.Parameter(torch.full((4096,), 0.5, dtype=torch.bfloat16))
    config = Optim(lr=1e-6, weight_decay=0.0, clip_grad=1e9)
    optimizer = Optimizer([("weight", weight)], config, Levers(rounding=rounding), seed=1)
    for _ in range(200):
        weight.grad.fill_(-1.0)
        optimizer.step(1e-6, Solo())
    return optimizer, weight.detach()


def test_stochastic_rounding_moves_in_expectation_what_nearest_would_not():
    optimizer, weight = moved_by_tiny_steps("stochastic")
    assert optimizer.master is None
    # A step up goes a whole spacing (2**-8) with odds of 1e-6 / 2**-8.
    moved = 200 * 1e-6
    error = math.sqrt(moved * 2**-8 / 4096)
    assert abs((weight.double() - 0.5).mean() - moved) < 4 * error
    assert set(weight.tolist()) > {0.5}
    # Rounded to nearest, nothing would have moved.
    assert torch.equal(weight + torch.tensor(1e-6).bfloat16(), weight)


def test_weights_follow_their_master_in_the_mean_and_move_once():
    optimizer, weight = moved_by_tiny_steps("master")
    master = optimizer.tensors()["master/weight"]
    moved = 200 * 1e-6
    assert master.mean().item() == pytest.approx(0.5 + moved, abs=200 * 2**-25)  # float32 rounds too
    assert set(master.bfloat16().tolist()) == {0.5}, "rounded to nearest, none of it would show"
    # As many as have a threshold below: independent ones, so that their share is binomial.
    odds = moved / 2**-8
    share = (weight == 0.5 + 2**-8).double().mean().item()
    assert share == pytest.approx(odds, abs=4 * math.sqrt(odds * (1 - odds) / 4096))
    assert set(weight.tolist()) == {0.5, 0.5 + 2**-8}
    # What has moved stays there: thresholds are those of every step.
    before = weight.clone()
    optimizer.parameters[0].grad.fill_(-1.0)
    optimizer.step(1e-6, Solo())
    assert (optimizer.parameters[0].detach() >= before).all()


def test_a_step_of_nothing_leaves_the_weights_of_a_checkpoint():
    """A master that begins at numbers of bfloat16 is rounded to them, whatever the thresholds."""
    weight = torch.nn.Parameter(torch.randn(3000, generator=torch.Generator().manual_seed(1)).bfloat16())
    before = weight.detach().clone()
    optimizer = Optimizer([("weight", weight)], Optim(weight_decay=0.0), seed=5)
    weight.grad.zero_()
    optimizer.step(1e-3, Solo())
    assert torch.equal(weight.detach(), before)


def test_stochastic_rounding_follows_the_seed_and_the_step():
    def weights(seed, steps):
        weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        optimizer = Optimizer([("weight", weight)], Optim(clip_grad=1e9), Levers(rounding="stochastic"), seed=seed)
        for _ in range(steps):
            weight.grad.fill_(1.0)
            optimizer.step(1e-3, Solo())
        return weight.detach()

    assert torch.equal(weights(1, 3), weights(1, 3))
    assert not torch.equal(weights(1, 3), weights(2, 3))
    # Other weights are rounded down in the second step than in the first: about a quarter or half of them would be.
    assert len(weights(1, 2).unique()) == 3


@pytest.mark.parametrize(
    ("rule", "dtype", "levers", "cause"),
    [
        ("adamw_8bit", torch.float32, Levers(state="host"), "adamw_8bit is not stepped on the host"),
        ("adamw", torch.bfloat16, Levers(state="host", rounding="stochastic"),
         "an optimizer on the host keeps a float32 master there, so nothing is left to round stochastically"),
        ("adamw", torch.float16, Levers(rounding="stochastic"),
         "stochastic rounding needs bfloat16 weights; these are float16"),
    ],
)  # fmt: skip
def test_levers_that_do_not_go_together_are_refused(rule, dtype, levers, cause):
    parameters = make_parameters(dtype)
    with pytest.raises(ConfigError) as caught:
        Optimizer(parameters, Optim(optimizer=rule), levers)
    assert caught.value.cause == cause
    assert all(parameter.grad is None for _, parameter in parameters)


class LargestResult(TorchDispatchMode):
    """Elements of the largest tensor that any operation has made anew."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        known = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in known:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("levers", [Levers(), Levers(rounding="stochastic"), Levers(state="streamed")])
def test_a_step_makes_nothing_larger_than_a_piece(rule, levers):
    parameters = [("weight", torch.nn.Parameter(torch.randn(9000).bfloat16()))]
    optimizer = Optimizer(parameters, Optim(optimizer=rule), levers, piece=512)
    give_gradient(parameters, 0)
    with LargestResult() as seen:
        assert optimizer.step(1e-3, Solo()) > 1
    assert seen.numel <= 512


@pytest.mark.parametrize(("before", "after"), [("device", "host"), ("host", "streamed"), ("streamed", "device")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_does_not_know_where_state_was(dtype, before, after):
    config = Optim(lr=1e-2)
    parameters = make_parameters(dtype)
    optimizer = Optimizer(parameters, config, Levers(state=before))
    give_gradient(parameters, 0)
    optimizer.step(1e-2, Solo())
    again = [(name, torch.nn.Parameter(torch.zeros_like(parameter))) for name, parameter in parameters]
    other = Optimizer(again, config, Levers(state=after))
    with torch.no_grad():
        for (_, new), (_, old) in zip(again, parameters, strict=True):
            new.copy_(old)
    other.restore({name: tensor.clone() for name, tensor in optimizer.tensors().items()})
    assert other.num_steps == 1
    for which, resumed in ((parameters, optimizer), (again, other)):
        give_gradient(which, 1)
        resumed.step(1e-2, Solo())
    assert torch.equal(flat(parameters), flat(again))
    assert optimizer.tensors().keys() == other.tensors().keys()


def test_a_checkpoint_of_another_optimizer_is_refused():
    saved = Optimizer(make_parameters(), Optim(optimizer="sgd")).tensors()
    assert saved.keys() == {"step"}
    optimizer = Optimizer(make_parameters(), Optim())
    with pytest.raises(ConfigError) as caught:
        optimizer.restore(saved | {"step": torch.tensor(9)})
    assert caught.value.cause == "the checkpoint's optimizer state has no exp_avg/layer.0"
    assert optimizer.num_steps == 0


def test_weights_rounded_stochastically_are_their_own_master():
    parameters = make_parameters(torch.bfloat16)
    saved = Optimizer(parameters, Optim(), Levers(rounding="stochastic")).tensors()
    optimizer = Optimizer(parameters, Optim())
    optimizer.master.zero_()
    optimizer.restore(saved)
    assert torch.equal(optimizer.master.double(), flat(parameters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restore_continues_exactly(dtype):
    config = Optim(lr=1e-2)
    parameters = make_parameters(dtype)
    optimizer = Optimizer(parameters, config)
    for step in range(3):
        give_gradient(parameters, step)
        optimizer.step(1e-2, Solo())
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    kinds = {name.split("/")[0] for name in saved}
    assert kinds == {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if dtype == torch.bfloat16 else set())

    again = [(name, torch.nn.Parameter(parameter.detach().clone())) for name, parameter in parameters]
    restored = Optimizer(again, config)
    restored.restore(saved)
    for which, resumed in ((parameters, optimizer), (again, restored)):
        for step in range(3, 5):
            give_gradient(which, step)
            resumed.step(1e-2, Solo())
    assert torch.equal(flat(parameters), flat(again))
    for name, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, restored.tensors()[name]), name


def test_moments_exist_before_the_first_step():
    optimizer = Optimizer(make_parameters(torch.bfloat16), Optim())
    assert optimizer.nbytes() == {"gradients": 30 * 2, "optimizer": 2 * 30 * 4, "master": 30 * 4}
    plain = Optimizer(make_parameters(), Optim())
    assert plain.nbytes() == {"gradients": 30 * 4, "optimizer": 2 * 30 * 4, "master": 0}


def test_a_master_is_copied_in_parts_and_whole(monkeypatch):
    """From a device, a wider copy on the host passes through memory as large as what is copied at once."""
    monkeypatch.setattr("ullage.engine.optimizer.COPIED", 7)
    copied = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function == torch.ops.aten.copy_.default:
                copied.append(args[1].numel())
            return function(*args, **(kwargs or {}))

    parameters = make_parameters(torch.bfloat16)
    with Copies():
        optimizer = Optimizer(parameters, Optim(), Levers(state="host"))
    assert torch.equal(optimizer.master.double(), flat(parameters))
    assert sum(copied) == 30
    assert max(copied) == 7


def test_bfloat16_gradients_are_clipped_in_float32():
    """3, 4 to a norm of 1: 0.6 and 0.8 are not bfloat16 numbers, and the first moment sees them as they are."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = Optimizer([("weight", parameter)], Optim(clip_grad=1.0, betas=(0.9, 0.99)))
    parameter.grad.copy_(torch.tensor([3.0, 4.0]))
    assert optimizer.step(1e-3, Solo()) == 5.0
    assert optimizer.tensors()["exp_avg/weight"].tolist() == pytest.approx([0.06, 0.08], rel=1e-6)


class _Twice(Solo):
    """Another rank with the same gradient."""

    def sum_tensor_(self, tensor):
        tensor.mul_(2)


def test_gradients_on_the_host_are_summed_over_ranks_there():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([("weight", parameter)], Optim(clip_grad=100.0, optimizer="sgd"), Levers(gradients="host"))
    (parameter * torch.tensor([3.0, 4.0])).sum().backward()
    assert optimizer.step(0.5, _Twice()) == 10.0
    assert parameter.tolist() == [-3.0, -4.0]


def test_gradients_are_summed_over_ranks_before_the_norm():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = Optimizer([("weight", parameter)], Optim(clip_grad=5.0))
    parameter.grad.copy_(torch.tensor([3.0, 4.0]))
    assert optimizer.step(1e-3, _Twice()) == 10.0
    assert parameter.grad.tolist() == pytest.approx([3.0, 4.0], abs=1e-5)


def test_constant_rate_with_warm_up():
    config = Optim(lr=1e-3, lr_warmup_steps=4)
    rates = [learning_rate(config, step, 10) for step in range(7)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3, 1e-3], rel=1e-12)


def test_warm_up_as_a_share_of_the_run():
    config = Optim(lr=1.0, lr_warmup_steps_ratio=0.3)
    assert [learning_rate(config, step, 10) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


def test_warm_up_steps_win_over_the_share():
    config = Optim(lr=1.0, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5)
    assert learning_rate(config, 0, 10) == 1.0


def test_cosine_rate():
    config = Optim(lr=2.0, lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1)
    rates = {step: learning_rate(config, step, 10) for step in (0, 1, 2, 4, 6, 10, 50)}
    # From 2.0 at step 2 to 0.2 at step 10: at a quarter (1 + cos 45) / 2, at half 1/2 of the way.
    quarter = 0.2 + 1.8 * (1 + math.sqrt(0.5)) / 2
    assert rates == pytest.approx({0: 1.0, 1: 2.0, 2: 2.0, 4: quarter, 6: 1.1, 10: 0.2, 50: 0.2}, rel=1e-12)
