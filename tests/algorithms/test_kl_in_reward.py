"""The KL penalty in the reward: what it takes from which token, and the coefficient that steers itself."""

import pytest
import torch
from credit_samples import VALID, doubles, make_config, make_experience, numbers

from experience_samples import load, make_train_batch
from experience_samples import make_config as make_step_config
from experience_samples import make_experience as make_real_experience
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.batch.pack import Limits
from ullage.workers.actor import Actor

OLD, REF = numbers(1), numbers(2)
MASK = make_experience().mask_NT


def evaluated(valid=VALID):
    return make_experience(valid=valid, old=OLD, ref=REF)


def test_it_needs_a_reference_and_old_logprobs():
    assert compose(make_config("grpo", use_kl_in_reward=True)).needs == {"reference", "old_logprobs"}
    assert compose(make_config("ppo", use_kl_in_reward=True)).needs == {"reference", "old_logprobs", "critic"}
    assert compose(make_config("grpo", kl_ctrl={"type": "adaptive"})).needs == set()


def test_a_group_compares_rewards_less_the_penalty():
    config = make_config("dr_grpo", use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.5})
    batch = compose(config).assign_credit(evaluated(), Solo())
    rewards = doubles([1.0, 0.0, 0.5, 2.0, 2.5]) - 0.5 * ((OLD - REF) * MASK).sum(-1)
    want = torch.cat([rewards[:3] - rewards[:3].mean(), rewards[3:] - rewards[3:].mean()])
    torch.testing.assert_close(batch.advantages_NT, want[:, None] * MASK, rtol=0, atol=1e-12)
    assert torch.equal(batch.rewards_N, doubles([1.0, 0.0, 0.5, 2.0, 2.5]))  # what is reported stays


def test_a_token_pays_for_itself():
    config = make_config("reinforce_plus_plus", use_kl_in_reward=True, kl_penalty="abs", kl_ctrl={"kl_coef": 2.0})
    returns = compose(config).assign_credit(evaluated(), Solo()).returns_NT
    paid = 2.0 * (OLD - REF).abs()
    assert returns[1, 1].item() == pytest.approx(0.0 - paid[1, 1].item(), abs=1e-12)
    assert returns[1, 0].item() == pytest.approx(0.0 - paid[1, :2].sum().item(), abs=1e-12)
    assert returns[0, 0].item() == pytest.approx(1.0 - paid[0, 0].item() - paid[0, 2].item(), abs=1e-12)


def test_a_fixed_coefficient_stays():
    algorithm = compose(make_config("grpo", use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.25}))
    for _ in range(2):
        algorithm.assign_credit(evaluated(), Solo())
    assert algorithm.state() == {"kl_coefficient": 0.25}


def adaptive(**control):
    control = {"type": "adaptive", "kl_coef": 0.25, "target_kl": 0.1, "horizon": 100, **control}
    return compose(make_config("grpo", use_kl_in_reward=True, kl_penalty="abs", kl_ctrl=control))


def test_an_adaptive_coefficient_follows_the_kl():
    """Applied first, moved then: by at most 20 % of samples over horizon; a little where the KL is near its target."""
    algorithm = adaptive()
    assert ((OLD - REF).abs() * MASK).sum(-1).min() > 0
    algorithm.assign_credit(evaluated(), Solo())
    assert algorithm.state()["kl_coefficient"] == pytest.approx(0.25 * (1 + 0.2 * 5 / 100), abs=1e-15)
    mean = (((OLD - REF).abs() * MASK).sum(-1) / MASK.sum(-1)).mean().item()
    near = adaptive(target_kl=mean / 1.1)
    near.assign_credit(evaluated(), Solo())
    assert near.state()["kl_coefficient"] == pytest.approx(0.25 * (1 + 0.1 * 5 / 100), abs=1e-9)
    below = adaptive(target_kl=100.0)
    below.assign_credit(evaluated(), Solo())
    assert below.state()["kl_coefficient"] == pytest.approx(0.25 * (1 - 0.2 * 5 / 100), abs=1e-15)


def test_the_first_credit_uses_the_coefficient_of_the_config():
    fixed = compose(make_config("grpo", use_kl_in_reward=True, kl_penalty="abs", kl_ctrl={"kl_coef": 0.25}))
    first, want = (a.assign_credit(evaluated(), Solo()).advantages_NT for a in (adaptive(), fixed))
    assert torch.equal(first, want)


def test_a_restored_coefficient_goes_on_where_it_was():
    algorithm, other = adaptive(), adaptive()
    algorithm.assign_credit(evaluated(), Solo())
    other.restore(algorithm.state())
    ours, theirs = (a.assign_credit(evaluated(), Solo()).advantages_NT for a in (algorithm, other))
    assert torch.equal(ours, theirs)
    assert algorithm.state() == other.state()
    plain = compose(make_config("grpo"))
    plain.restore(plain.state())
    assert plain.state() == {}


class TwoRanks(Solo):
    """The other rank holds the same samples."""

    size = 2

    def sum(self, values):
        return [2 * value for value in values]


def test_the_kl_is_the_mean_of_all_ranks_and_so_is_the_number_of_samples():
    alone, two = adaptive(target_kl=0.3), adaptive(target_kl=0.3)
    alone.assign_credit(evaluated(), Solo())
    two.assign_credit(evaluated(), TwoRanks())
    moved, moved_twice = (a.state()["kl_coefficient"] / 0.25 - 1 for a in (alone, two))
    assert moved != 0
    assert moved_twice == pytest.approx(2 * moved, abs=1e-12)


def test_an_empty_step_leaves_the_coefficient():
    algorithm = adaptive()
    algorithm.assign_credit(evaluated().select(torch.tensor([], dtype=torch.long)), Solo())
    assert algorithm.state() == {"kl_coefficient": 0.25}


def test_a_reference_for_the_reward_alone_is_no_part_of_the_loss(tiny_model):
    config, model = make_step_config(), load(tiny_model)
    assert not config.actor_rollout_ref.actor.use_kl_loss
    made = make_real_experience(model)
    losses, gradients, reports = [], [], []
    for reference in (made.ref_logprobs_NT, None):
        experience = made.evaluated(old_logprobs=made.old_logprobs_NT, ref_logprobs=reference, values=None)
        actor = Actor(model, config.actor_rollout_ref.actor, Limits(max_tokens=4096), Solo(), temperature=1.0)
        terms = actor.backward(make_train_batch(experience, config), compose(config))
        losses.append(terms.loss)
        gradients.append(actor.optimizer.gradient.clone())
        reports.append(terms.report)
    assert losses[0] == losses[1]
    assert torch.equal(*gradients)
    assert reports[0]["actor/kl_ref"][0] > 0  # reported all the same
    assert "actor/kl_ref" not in reports[1]
