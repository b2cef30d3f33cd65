"""Stored values of verl 0.9.1 in float64: advantages, policy loss and gradient, KL estimators, aggregation."""

import json
from pathlib import Path

import pytest
import torch

from ullage.maths import aggregate, kl
from ullage.maths.advantages import group_relative
from ullage.maths.aggregate import Counts
from ullage.maths.losses import clipped_surrogate

CASES = json.loads((Path(__file__).parent.parent / "golden" / "verl_grpo.json").read_text())["cases"]
TOLERANCE = {"rtol": 0, "atol": 1e-9}

pytestmark = pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def weights_of(mask, mode):
    counts = Counts(*aggregate.count(mask))
    return aggregate.token_weights(mask, mode, counts, scale=float(mask.shape[1]), dtype=torch.float64)


def test_grpo_advantages(case):
    mask = tensor(case["inputs"]["mask"]).bool()
    rewards = tensor(case["inputs"]["token_level_rewards"]).sum(-1)
    names = sorted(set(case["inputs"]["group"]))
    groups = torch.tensor([names.index(name) for name in case["inputs"]["group"]])
    valid = torch.ones(len(rewards), dtype=torch.bool)
    assert len(case["expected"]["advantages"]) == 2
    for expected in case["expected"]["advantages"]:
        got = group_relative(rewards, groups, valid, divide_by_std=expected["params"]["norm_adv_by_std"])
        want = tensor(expected["advantages"])
        torch.testing.assert_close((got[:, None] * mask)[mask], want[mask], **TOLERANCE)


def test_policy_loss_and_gradient(case):
    mask = tensor(case["inputs"]["mask"]).bool()
    old, advantages = tensor(case["inputs"]["old_logprobs"]), tensor(case["inputs"]["advantages"])
    assert len(case["expected"]["policy_loss"]) == 5
    for expected in case["expected"]["policy_loss"]:
        logprobs = tensor(case["inputs"]["logprobs"]).requires_grad_()
        clip = expected["params"]
        losses, _ = clipped_surrogate(
            logprobs, old, advantages, clip_low=clip["clip_low"], clip_high=clip["clip_high"], dual_clip=clip["clip_c"]
        )
        loss = (losses * weights_of(mask, expected["aggregate"])).sum()
        assert loss.item() == pytest.approx(expected["loss"], rel=0, abs=1e-9)
        (gradient,) = torch.autograd.grad(loss, [logprobs])
        torch.testing.assert_close(gradient, tensor(expected["grad"]), **TOLERANCE)


def test_kl_estimators_and_gradients(case):
    mask = tensor(case["inputs"]["mask"]).bool()
    ref = tensor(case["inputs"]["ref_logprobs"])
    assert len(case["expected"]["kl"]) == 4
    for expected in case["expected"]["kl"]:
        logprobs = tensor(case["inputs"]["logprobs"]).requires_grad_()
        values = kl.ESTIMATORS[expected["name"]](logprobs, ref)
        torch.testing.assert_close(values[mask], tensor(expected["value"])[mask], **TOLERANCE)
        (gradient,) = torch.autograd.grad((values * mask).sum(), [logprobs])
        torch.testing.assert_close(gradient, tensor(expected["grad_of_masked_sum"]), **TOLERANCE)


def test_aggregation(case):
    mask = tensor(case["inputs"]["mask"]).bool()
    assert len(case["expected"]["aggregate"]) == 5
    for expected in case["expected"]["aggregate"]:
        values = tensor(case["inputs"][expected["of"]])
        got = (values * weights_of(mask, expected["name"])).sum().item()
        assert got == pytest.approx(expected["value"], rel=0, abs=1e-9)
