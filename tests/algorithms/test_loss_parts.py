"""Losses of every algorithm: the maths they use, with what the config says, and what they report."""

import pytest
import torch
from credit_samples import make_config, make_experience, numbers

from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.maths import covariance, losses

OLD = numbers(1)
NEW = OLD + 0.5 * (numbers(2) + 0.5)  # ratios from 0.78 to 1.28
SELECTED = torch.zeros(5, 3, dtype=torch.bool)
SELECTED[0, 2] = SELECTED[4, 0] = True
CLIP = {"clip_low": 0.05, "clip_high": 0.1}
ACTOR = {
    "clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.1, "tau_pos": 2.0, "tau_neg": 3.0,
    "policy_loss": {
        "clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0, "kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7,
    },
}  # fmt: skip

# Each from (advantages, mask): loss and clip, or the loss alone where there is no clip.
MATHS = {
    "ppo": lambda a, m: losses.clipped_surrogate(NEW, OLD, a, dual_clip=1.1, **CLIP),
    "dapo": lambda a, m: losses.clipped_surrogate(NEW, OLD, a, dual_clip=1.1, **CLIP),
    "gspo": lambda a, m: losses.gspo(NEW, OLD, a, m, **CLIP),
    "sapo": lambda a, m: (losses.sapo(NEW, OLD, a, tau_positive=2.0, tau_negative=3.0), None),
    "gpg": lambda a, m: (losses.gpg(NEW, a), None),
    "cispo": lambda a, m: losses.cispo(NEW, OLD, a, **CLIP),
    "gmpo": lambda a, m: losses.geo_mean(NEW, OLD, a, m, **CLIP),
    "clip_cov": lambda a, m: covariance.clip_cov(NEW, OLD, a, SELECTED, **CLIP),
    "kl_cov": lambda a, m: (covariance.kl_cov(NEW, OLD, a, SELECTED, coefficient=0.7), None),
}


def composed(name):
    config = make_config(name, actor=ACTOR)
    algorithm = compose(config)
    experience = make_experience(values=numbers(3))
    return algorithm, algorithm.assign_credit(experience, Solo())


@pytest.mark.parametrize("name", MATHS)
def test_loss_is_the_maths(name):
    algorithm, batch = composed(name)
    loss, clipped = MATHS[name](batch.advantages_NT, batch.mask_NT)
    got = algorithm.policy_loss(NEW, OLD, batch.selecting(SELECTED))
    torch.testing.assert_close(got.loss_NT, loss, rtol=0, atol=0)
    assert got.loss_NT.abs().sum() > 0
    torch.testing.assert_close(got.report_NT["actor/kl_old"], OLD - NEW, rtol=0, atol=0)
    assert ("actor/clip_fraction" in got.report_NT) == (clipped is not None)
    if clipped is not None:
        assert clipped.any()
        assert torch.equal(got.report_NT["actor/clip_fraction"], clipped)


def test_every_loss_is_here():
    from ullage.base import extensions

    with_loss = [n for n in extensions.known("algorithms") if hasattr(extensions.find("algorithms", n), "Loss")]
    assert sorted(MATHS) == with_loss


def test_clip_cov_selects_with_the_settings_of_the_config():
    algorithm, batch = composed("clip_cov")
    selected = algorithm.prepare(batch, NEW, Solo(), seed=5).selected_NT
    want = covariance.clip_cov_select(
        NEW, NEW, batch.advantages_NT, batch.mask_NT, batch.sample_N,
        fraction=0.2, low=-9.0, high=9.0, seed=5, **CLIP,
    )  # fmt: skip
    assert torch.equal(selected, want)
    assert int(selected.sum()) == 2  # a fifth of eleven tokens
    others = [algorithm.prepare(batch, NEW, Solo(), seed=seed).selected_NT for seed in range(6, 12)]
    assert any(not torch.equal(other, selected) for other in others)


def test_clip_cov_passes_over_tokens_that_are_clipped_anyway():
    """The ratio is the one to the old policy, where there is one: every token below is far outside its clip."""
    algorithm, batch = composed("clip_cov")
    far = batch.advantages_NT.sign() * 3.0
    off_policy = make_experience(values=numbers(3), old=NEW - far)
    batch = algorithm.assign_credit(off_policy, Solo())
    candidates = batch.mask_NT & (batch.advantages_NT == 0)
    selected = algorithm.prepare(batch, NEW, Solo(), seed=5).selected_NT
    assert torch.equal(selected & ~candidates, torch.zeros_like(selected))


def test_kl_cov_selects_the_highest_covariance_whatever_the_seed():
    algorithm, batch = composed("kl_cov")
    selected = algorithm.prepare(batch, NEW, Solo(), seed=5).selected_NT
    want = covariance.kl_cov_select(NEW, batch.advantages_NT, batch.mask_NT, batch.sample_N, fraction=0.3)
    assert torch.equal(selected, want)
    assert int(selected.sum()) == 3  # three tenths of eleven tokens
    assert torch.equal(selected, algorithm.prepare(batch, NEW, Solo(), seed=6).selected_NT)
