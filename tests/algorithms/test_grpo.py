"""GRPO: credit on every sampled token, clip settings from the config, what has no signal."""

import math

import pytest
import torch

from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.batch.stages import Rollouts
from ullage.config.tree import Config


def make_config(actor=None, algorithm=None):
    return Config.model_validate({"actor_rollout_ref": {"actor": actor or {}}, "algorithm": algorithm or {}})


def make_experience(rewards, valid=(True, True, True, True)):
    rollouts = Rollouts(
        prompts=((5,), (6,)),
        order_G=torch.arange(2),
        group_N=torch.tensor([0, 0, 1, 1]),
        sample_N=torch.arange(4),
        responses=((3, 9, 2), (4, 2), (2,), (3, 2)),
        mask_NT=torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]], dtype=torch.bool),
        rollout_logprobs_NT=torch.zeros(4, 3),
        finish_reasons=("stop",) * 4,
    )
    return rollouts.scored(rewards_N=torch.tensor(rewards, dtype=torch.float64), valid_N=torch.tensor(valid))


def test_credit_is_spread_over_sampled_tokens_only():
    batch = compose(make_config()).assign_credit(make_experience([1.0, 0.0, 2.0, 2.0]), Solo())
    advantage = 0.5 / (math.sqrt(0.5) + 1e-6)
    want = [[advantage, 0, advantage], [-advantage, -advantage, 0], [0, 0, 0], [0, 0, 0]]
    torch.testing.assert_close(batch.advantages_NT, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


def test_dr_grpo_leaves_out_the_deviation():
    config = make_config(algorithm={"norm_adv_by_std_in_grpo": False})
    batch = compose(config).assign_credit(make_experience([1.0, 0.0, 2.0, 2.0]), Solo())
    assert batch.advantages_NT[:, 0].tolist() == [0.5, -0.5, 0.0, 0.0]


def test_groups_of_equal_rewards_have_no_signal():
    algorithm = compose(make_config())
    assert algorithm.has_signal(make_experience([1.0, 0.0, 2.0, 2.0])).tolist() == [True, True, False, False]
    experience = make_experience([1.0, 0.0, 2.0, 5.0], valid=(True, True, False, True))
    assert algorithm.has_signal(experience).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    ("actor", "low", "high", "dual"),
    [
        ({}, 0.8, 1.2, 3.0),
        ({"clip_ratio": 0.1}, 0.9, 1.1, 3.0),
        ({"clip_ratio_low": 0.3, "clip_ratio_high": 0.4, "clip_ratio_c": 5.0}, 0.7, 1.4, 5.0),
    ],
)
def test_loss_clips_as_configured(actor, low, high, dual):
    algorithm = compose(make_config(actor))
    batch = algorithm.assign_credit(make_experience([1.0, 0.0, 1.0, 0.0]), Solo())
    old = torch.full((4, 3), -1.0, dtype=torch.float64)
    advantage = batch.advantages_NT[0, 0].item()

    def loss(ratio):
        return algorithm.policy_loss(old + math.log(ratio), old, batch)

    assert loss(3.0).loss_NT[0, 0].item() == pytest.approx(-high * advantage)
    assert loss(0.1).loss_NT[1, 0].item() == pytest.approx(low * advantage)
    assert loss(50.0).loss_NT[1, 0].item() == pytest.approx(dual * advantage)
    report = loss(3.0).report_NT
    assert report["actor/clip_fraction"][:, 0].tolist() == [True, False, True, False]
    torch.testing.assert_close(report["actor/kl_old"], torch.full_like(old, -math.log(3.0)), rtol=0, atol=1e-12)
