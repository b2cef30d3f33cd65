"""The losses beside PPO's by hand, each branch with its gradient."""

import math

import pytest
import torch

from ullage.maths import losses
from ullage.maths.aggregate import Counts, count, token_weights


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def one_token(loss_of, ratio, advantage, **options):
    """(loss, second output or None, d loss / d logprob) of one token with old log-prob -1."""
    logprob = tensor([[math.log(ratio) - 1.0]]).requires_grad_()
    got = loss_of(logprob, tensor([[-1.0]]), tensor([[advantage]]), **options)
    loss, clipped = got if isinstance(got, tuple) else (got, None)
    loss.sum().backward()
    return loss.item(), None if clipped is None else clipped.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.1, 2.0, 1.1, False),
        (1.5, 2.0, 1.3, True),
        (0.5, 2.0, 0.8, True),
        (0.5, -2.0, 0.8, True),
        (1.0, 0.0, 1.0, False),
    ],
)
def test_cispo(ratio, advantage, weight, clipped):
    loss, active, gradient = one_token(losses.cispo, ratio, advantage, clip_low=0.2, clip_high=0.3)
    assert loss == pytest.approx(-weight * advantage * (math.log(ratio) - 1), rel=1e-14)
    assert active is clipped
    assert gradient == pytest.approx(-weight * advantage, rel=1e-14)  # a clipped token learns too


def test_plain_policy_gradient():
    logprobs = tensor([[-0.5, -2.0]]).requires_grad_()
    loss = losses.gpg(logprobs, tensor([[3.0, -1.0]]))
    loss.sum().backward()
    assert loss.tolist() == [[1.5, -2.0]]
    assert logprobs.grad.tolist() == [[-3.0, 1.0]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "tau"), [(1.0, 2.0, 0.5), (1.7, 2.0, 0.5), (1.7, -2.0, 3.0), (0.2, 0.0, 3.0)]
)
def test_soft_gate(ratio, advantage, tau):
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    loss, _, gradient = one_token(losses.sapo, ratio, advantage, tau_positive=0.5, tau_negative=3.0)
    assert loss == pytest.approx(-advantage * gate * 4 / tau, rel=1e-14)
    assert gradient == pytest.approx(-advantage * 4 * gate * (1 - gate) * ratio, rel=1e-14)


def test_soft_gate_keeps_its_precision():
    loss, _, _ = one_token(losses.sapo, 1.0, -1.0, tau_positive=1.0, tau_negative=1.05)
    assert loss == pytest.approx(2 / 1.05, rel=1e-15)


@pytest.mark.parametrize(
    ("advantage", "clip_high", "loss", "clipped"),
    [(2.0, 0.5, -2 * math.exp(0.2), False), (2.0, 0.1, -2.2, True), (-2.0, 0.1, 2 * math.exp(0.2), False)],
)
def test_sequence_ratio(advantage, clip_high, loss, clipped):
    # Log-ratios 0.5 and -0.1 on sampled tokens: mean 0.2. The masked token's 9 counts nothing.
    logprobs = tensor([[-0.5, 8.0, -1.1]]).requires_grad_()
    mask = torch.tensor([[1, 0, 1]])
    got, active = losses.gspo(
        logprobs, tensor([[-1.0, -1.0, -1.0]]), torch.full((1, 3), advantage), mask, clip_low=0.5, clip_high=clip_high
    )
    (got * mask).sum().backward()
    assert got[0, [0, 2]].tolist() == pytest.approx([loss] * 2, rel=1e-14)
    assert active[0, [0, 2]].tolist() == [clipped] * 2
    assert logprobs.grad[0].tolist() == pytest.approx(
        [0.0 if clipped else loss, 0.0, 0.0 if clipped else loss], rel=1e-14
    )


def test_sequence_ratio_of_absurd_tokens_stays_finite():
    got, _ = losses.gspo(
        tensor([[0.0]]), tensor([[-600.0]]), tensor([[-1.0]]), torch.ones(1, 1), clip_low=0.2, clip_high=0.2
    )
    assert got.item() == pytest.approx(math.exp(10), rel=1e-14)


@pytest.mark.parametrize(
    ("advantage", "clipped_log_ratios", "clipped"),
    [
        (2.0, [0.4, -0.9], [True, False]),  # only above
        (-2.0, [0.7, -0.3], [False, True]),  # only below
        (0.0, [0.0, 0.0], [False, False]),
    ],
)
def test_geometric_mean(advantage, clipped_log_ratios, clipped):
    logprobs = tensor([[-0.3, 5.0, -1.9]]).requires_grad_()  # log-ratios 0.7, masked, -0.9
    mask = torch.tensor([[1, 0, 1]])
    got, active = losses.geo_mean(
        logprobs,
        tensor([[-1.0] * 3]),
        torch.full((1, 3), advantage, dtype=torch.float64),
        mask,
        clip_low=0.3,
        clip_high=0.4,
    )
    loss = (got * token_weights(mask, "seq-mean-token-mean", Counts(*count(mask)), scale=1, dtype=torch.float64)).sum()
    loss.backward()
    want = -advantage * 2 / (2 + 1e-8) * math.exp(sum(clipped_log_ratios) / (2 + 1e-8))
    assert loss.item() == pytest.approx(want, rel=1e-15)
    assert active[0, [0, 2]].tolist() == clipped
    slope = [0.0 if cut else want / (2 + 1e-8) for cut in clipped]
    assert logprobs.grad[0].tolist() == pytest.approx([slope[0], 0.0, slope[1]], rel=1e-14)


def test_geometric_mean_counts_each_sequence_once():
    """verl's number: the mean over rows, whatever their lengths, rows without tokens included."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    advantages = tensor([[1.0] * 3, [-2.0] * 3, [5.0] * 3])
    got, _ = losses.geo_mean(torch.zeros(3, 3), torch.zeros(3, 3), advantages, mask, clip_low=0.4, clip_high=0.4)
    weights = token_weights(mask, "seq-mean-token-mean", Counts(4, 3), scale=1, dtype=torch.float64)
    want = (-1 * 3 / (3 + 1e-8) + 2 / (1 + 1e-8)) / 3
    assert (got * weights).sum().item() == pytest.approx(want, rel=1e-15)
