"""KL estimators by hand: log-prob -1 against -1.5, and the limits of the clamped one."""

import math

import pytest
import torch

from ullage.maths import kl


def value(name, logprob, ref):
    return kl.ESTIMATORS[name](*torch.tensor([[logprob], [ref]], dtype=torch.float64)).item()


@pytest.mark.parametrize(
    ("names", "want"),
    [
        (("kl", "k1"), 0.5),
        (("abs",), 0.5),
        (("mse", "k2"), 0.125),
        (("low_var_kl", "k3"), math.exp(-0.5) + 0.5 - 1),
    ],
)
def test_by_hand(names, want):
    for name in names:
        assert value(name, -1.0, -1.5) == pytest.approx(want, rel=1e-12)


def test_signs():
    assert value("k1", -1.5, -1.0) == -0.5
    assert value("abs", -1.5, -1.0) == 0.5


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_equal_policies_have_none(name):
    assert value(name, -2.0, -2.0) == 0.0


def test_k3_is_clamped():
    assert value("k3", -100.0, 0.0) == 10.0
    assert value("k3", 0.0, -100.0) == 10.0
    assert value("k3", 0.0, -9.0) == pytest.approx(math.exp(-9) + 8, rel=1e-12)


def test_k2_has_the_gradient_of_the_divergence():
    """The expected gradient of k2 under the policy is that of KL(policy || reference)."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.5, -0.4], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (want,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), [logits], retain_graph=True)
    (got,) = torch.autograd.grad((logprobs.exp().detach() * kl.k2(logprobs, ref)).sum(), [logits])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_straight_through_has_the_value_of_its_base_and_the_gradient_of_k2(name):
    logprobs = torch.tensor([-1.0, -0.3, -40.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -0.7, -1.0], dtype=torch.float64)
    values = kl.ESTIMATORS[f"{name}+"](logprobs, ref)
    assert torch.equal(values, kl.ESTIMATORS[name](logprobs, ref))
    (gradient,) = torch.autograd.grad(values.sum(), [logprobs])
    assert gradient.tolist() == (logprobs - ref).tolist()


def test_penalised_rewards_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    divergence = torch.tensor([[0.5, math.nan, -0.25]], dtype=torch.float64)
    got = kl.penalised_rewards(rewards, divergence, torch.tensor([[1, 0, 1]]), 0.1)
    assert got.tolist() == [[-0.05, 0.0, 1.025]]


@pytest.mark.parametrize(
    ("measured", "want"),
    [
        (6.0, 0.2),
        (6.3, 0.2 * (1 + 0.05 * 256 / 10_000)),
        (12.0, 0.2 * (1 + 0.2 * 256 / 10_000)),  # an error of 1 counts as 0.2
        (0.0, 0.2 * (1 - 0.2 * 256 / 10_000)),
        (-3.0, 0.2 * (1 - 0.2 * 256 / 10_000)),
    ],
)
def test_adaptive_coefficient_by_hand(measured, want):
    got = kl.new_coefficient(0.2, kl=measured, target=6.0, horizon=10_000, batch_size=256)
    assert got == pytest.approx(want, rel=1e-14)
