"""Clip-Cov and KL-Cov by hand; the choice of tokens is that of the whole mini-batch, on one rank or two."""

import math

import pytest
import torch
from two_ranks import on_two_ranks

from ullage.maths import covariance

MASK64 = (1 << 64) - 1


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# Means 0 and -2 over the four sampled tokens, so covariances 2, 2, 0, 0; the last place is padding.
ADVANTAGES = tensor([[2.0, -2.0, 1.0, -1.0, 0.0]])
LOGPROBS = tensor([[-1.0, -3.0, -2.0, -2.0, 0.0]])
MASK = torch.tensor([[1, 1, 1, 1, 0]], dtype=torch.bool)
SAMPLE = torch.tensor([3])
CLIPS = {"clip_low": 0.2, "clip_high": 0.2}


def select(old, seed=0, fraction=2e-4, low=1.0, high=5.0):
    return covariance.clip_cov_select(
        LOGPROBS, old, ADVANTAGES, MASK, SAMPLE, **CLIPS, fraction=fraction, low=low, high=high, seed=seed
    )


def test_a_token_that_is_clipped_already_is_no_candidate():
    old = tensor([[-2.0, -3.0, -2.0, -2.0, 0.0]])  # ratio e on the first token, with a positive advantage
    for seed in range(8):
        assert select(old, seed, fraction=1.0).tolist() == [[False, True, False, False, False]]
    loss, stopped = covariance.clip_cov(LOGPROBS, old, ADVANTAGES, select(old), **CLIPS)
    assert loss.tolist() == [[-2.4, 0.0, -1.0, 1.0, 0.0]]
    assert stopped.tolist() == [[True, True, False, False, False]]


def test_dropped_tokens_have_no_gradient():
    logprobs = LOGPROBS.clone().requires_grad_()
    loss, _ = covariance.clip_cov(logprobs, LOGPROBS, ADVANTAGES, torch.tensor([[1, 0, 0, 0, 0]]).bool(), **CLIPS)
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, 2.0, -1.0, 1.0, 0.0]]


def test_random_choice_among_candidates():
    choices = [tuple(select(LOGPROBS, seed)[0, :2].tolist()) for seed in range(64)]
    assert set(choices) == {(True, False), (False, True)}
    assert 20 < choices.count((True, False)) < 44  # binomial(64, 1/2): outside with probability 0.0028, seeds are fixed
    assert choices == [tuple(select(LOGPROBS, seed)[0, :2].tolist()) for seed in range(64)]


@pytest.mark.parametrize(("low", "high", "chosen"), [(2.0, 5.0, 0), (1.0, 2.0, 0), (1.9, 2.1, 2)])
def test_bounds_are_exclusive(low, high, chosen):
    logprobs = tensor([[1.0, -1.0, 0.0, 0.0, 0.0]])  # mean 0, so that the covariances are exactly 2
    got = covariance.clip_cov_select(
        logprobs, logprobs, ADVANTAGES, MASK, SAMPLE, **CLIPS, fraction=1.0, low=low, high=high, seed=0
    )
    assert got.tolist() == [[chosen == 2, chosen == 2, False, False, False]]


def test_the_share_of_tokens_is_rounded_down_and_at_least_one():
    def chosen(fraction):
        got = covariance.kl_cov_select(LOGPROBS, ADVANTAGES + LOGPROBS, MASK, SAMPLE, fraction=fraction)
        return int(got.sum())

    assert [chosen(fraction) for fraction in (1e-4, 0.49, 0.5, 0.8, 1.0)] == [1, 1, 2, 3, 4]


def test_highest_covariances_are_penalised():
    # Covariances with advantages 3, -1, 0, -2 (mean 0): 3, 1, 0, 0.
    advantages = tensor([[3.0, -1.0, 0.0, -2.0, 0.0]])
    old = tensor([[-1.5, -2.0, -2.0, -2.25, 0.0]])
    chosen = covariance.kl_cov_select(LOGPROBS, advantages, MASK, SAMPLE, fraction=0.5)
    assert chosen.tolist() == [[True, True, False, False, False]]
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = covariance.kl_cov(logprobs, old, advantages, chosen, coefficient=0.1)
    loss.sum().backward()
    up, down, quarter = math.exp(0.5), math.exp(-1), math.exp(0.25)
    assert loss[0].tolist() == pytest.approx([-3 * up + 0.05, down + 0.1, 0.0, 2 * quarter, 0.0], rel=1e-14)
    assert logprobs.grad[0].tolist() == pytest.approx([-3 * up + 0.1, down - 0.1, 0.0, 2 * quarter, 0.0], rel=1e-14)


def test_equal_covariances_are_not_all_taken():
    chosen = covariance.kl_cov_select(
        torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3), torch.arange(2), fraction=0.4
    )
    assert int(chosen.sum()) == 2


def test_nothing_to_choose_from():
    none = MASK & False
    assert not covariance.kl_cov_select(LOGPROBS, ADVANTAGES, none, SAMPLE, fraction=0.5).any()
    assert not select(LOGPROBS, low=4.0).any()
    assert covariance.kl_cov_select(LOGPROBS[:, :0], ADVANTAGES[:, :0], none[:, :0], SAMPLE, fraction=0.5).shape == (
        1,
        0,
    )


@pytest.mark.parametrize("seed", range(4))
def test_two_ranks_choose_as_one(seed):
    noise = torch.Generator().manual_seed(seed)
    logprobs, advantages, old = torch.randn(3, 6, 9, dtype=torch.float64, generator=noise)
    mask = torch.rand(6, 9, generator=noise) < 0.8
    samples = torch.tensor([7, 1, 30, 4, 2, 9])
    options = {"clip_low": 3.0, "clip_high": 3.0, "fraction": 0.1, "low": 0.1, "high": 5.0, "seed": seed}
    rows = [torch.tensor([0, 4]), torch.tensor([1, 2, 3, 5])]
    width = [9, 9]
    width[0] = int(mask[rows[0]].any(0).nonzero().max()) + 1  # its own padding

    def parts(whole, rank):
        return whole[rows[rank]][:, : width[rank]]

    def choose(ranks):
        part = [parts(x, ranks.rank) for x in (logprobs, advantages, mask)]
        dropped = covariance.clip_cov_select(
            part[0], parts(old, ranks.rank), *part[1:], samples[rows[ranks.rank]], **options, ranks=ranks
        )
        return dropped, covariance.kl_cov_select(*part, samples[rows[ranks.rank]], fraction=0.1, ranks=ranks)

    whole_dropped = covariance.clip_cov_select(logprobs, old, advantages, mask, samples, **options)
    whole_penalised = covariance.kl_cov_select(logprobs, advantages, mask, samples, fraction=0.1)
    assert int(whole_dropped.sum()) == int(whole_penalised.sum()) == int(0.1 * mask.sum())
    for rank, (dropped, penalised) in enumerate(on_two_ranks(choose)):
        assert torch.equal(dropped, parts(whole_dropped, rank))
        assert torch.equal(penalised, parts(whole_penalised, rank))


def mix(x):
    """splitmix64's finaliser on Python's integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK64
    return x ^ (x >> 31)


def test_noise_is_splitmix():
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # its published first output for seed 0
    seed, samples = (1 << 62) + 12345, [0, 5, 1 << 40]
    want = [
        [
            (mix((mix((seed + 0x9E3779B97F4A7C15 * (s + 1)) & MASK64) + 0x9E3779B97F4A7C15 * (t + 1)) & MASK64) >> 11)
            / 2**53
            for t in range(4)
        ]
        for s in samples
    ]
    assert covariance.token_noise(seed, torch.tensor(samples), 4).tolist() == want
