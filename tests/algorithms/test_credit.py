"""Credit of every algorithm on one step made by hand: the maths it uses, with what the config says."""

import math

import pytest
import torch
from credit_samples import REWARDS, doubles, make_config, make_experience, numbers

from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.maths import advantages, advantages_token, masked

UNSCORED = (True, True, False, True, True)
PARTS = ((1.0, 0.0), (0.0, 100.0), (0.5, 50.0), (2.0, 10.0), (2.5, 30.0))
BASELINE = (0.5, 2.0)
VALUES = numbers(3)
FIRST_STD, SECOND_STD = 0.5 + 1e-6, 0.125**0.5 + 1e-6


def spread(advantage_of):
    """An advantage of the whole response, on each of its sampled tokens."""
    return lambda e: (advantage_of(e.rewards_N, e.group_N, e.valid_N, e)[:, None] * e.mask_NT, None)


def token_rewards(experience):
    return advantages_token.at_last_token(experience.rewards_N, experience.mask_NT)


def gae(experience):
    credit, returns = advantages_token.gae(token_rewards(experience), VALUES, experience.mask_NT, gamma=0.9, lam=0.8)
    return masked.whitened(credit, experience.mask_NT), returns


CREDIT = {
    "ppo": gae,
    "grpo": spread(lambda r, g, v, e: advantages.group_relative(r, g, v)),
    "dr_grpo": spread(lambda r, g, v, e: advantages.group_relative(r, g, v, divide_by_std=False)),
    "dapo": spread(lambda r, g, v, e: advantages.group_relative(r, g, v)),
    "gspo": spread(lambda r, g, v, e: advantages.group_relative(r, g, v)),
    "rloo": spread(lambda r, g, v, e: advantages.rloo(r, g, v)),
    "opo": spread(lambda r, g, v, e: advantages.opo(r, g, v, e.mask_NT)),
    "gpg": spread(lambda r, g, v, e: advantages.gpg(r, g, v)),
    "grpo_passk": spread(lambda r, g, v, e: advantages.grpo_passk(r, g, v)),
    "reinforce_plus_plus": lambda e: advantages_token.reinforce_plus_plus(token_rewards(e), e.mask_NT, gamma=0.9),
    "reinforce_plus_plus_baseline": lambda e: (
        advantages_token.reinforce_plus_plus_baseline(e.rewards_N, e.group_N, e.valid_N, e.mask_NT), None
    ),
    "remax": lambda e: advantages_token.remax(token_rewards(e), doubles(BASELINE)[e.group_N], e.mask_NT),
    "gdpo": lambda e: (advantages_token.gdpo(doubles(PARTS), [1.0, 2.0], e.group_N, e.valid_N, e.mask_NT), None),
}  # fmt: skip


@pytest.mark.parametrize("valid", [(True,) * 5, UNSCORED])
@pytest.mark.parametrize("name", CREDIT)
def test_credit_is_the_maths(name, valid):
    config = make_config(name, functions=2, gamma=0.9, lam=0.8)
    experience = make_experience(valid=valid, parts=PARTS, baseline=BASELINE, values=VALUES)
    batch = compose(config).assign_credit(experience, Solo())
    credit, returns = CREDIT[name](experience)
    assert batch.advantages_NT.abs().sum() > 0
    torch.testing.assert_close(batch.advantages_NT, credit, rtol=0, atol=0)
    assert not batch.advantages_NT[~experience.mask_NT].any()
    assert (batch.returns_NT is None) == (returns is None)
    if returns is not None:
        torch.testing.assert_close(batch.returns_NT, returns, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("dr_grpo", [0.5, -0.5, 0.0], [-0.25, 0.25]),
        ("grpo", [0.5 / FIRST_STD, -0.5 / FIRST_STD, 0.0], [-0.25 / SECOND_STD, 0.25 / SECOND_STD]),
        ("rloo", [0.75, -0.75, 0.0], [-0.5, 0.5]),
        ("opo", [0.5, -0.5, 0.0], [-1 / 3, 1 / 6]),  # lengths 2, 2, 3 and 1, 2
        ("gpg", [0.625, -0.625, 0.0], [-0.3125, 0.3125]),  # four of five earn something
        ("grpo_passk", [0.5 / FIRST_STD, 0.0, 0.0], [0.0, 0.5 / SECOND_STD]),
        ("raft", [1.0, 0.0, 0.0], [0.0, 1.0]),
        ("remax", [0.5, -0.5, 0.0], [0.0, 0.5]),
    ],
)  # fmt: skip
def test_credit_by_hand(name, first, second):
    batch = compose(make_config(name)).assign_credit(make_experience(baseline=BASELINE), Solo())
    # Opo's baseline of the first group is (2 * 1 + 2 * 0 + 3 * 0.5) / 7 = 0.5.
    torch.testing.assert_close(batch.advantages_NT[:, 0], doubles([*first, *second]), rtol=0, atol=1e-12)


def test_discounted_returns_are_whitened():
    """Half is lost per sampled token; the tool's token takes no time."""
    batch = compose(make_config("reinforce_plus_plus", gamma=0.5)).assign_credit(make_experience(), Solo())
    returns = doubles([[0.5, 0, 1], [0, 0, 0], [0.125, 0.25, 0.5], [2, 0, 0], [1.25, 2.5, 0]])
    torch.testing.assert_close(batch.returns_NT, returns, rtol=0, atol=1e-12)
    credit = batch.advantages_NT[batch.mask_NT]
    assert credit.mean().item() == pytest.approx(0, abs=1e-8)
    assert credit.std().item() == pytest.approx(1, abs=1e-7)


def test_gdpo_hears_a_small_reward_beside_a_large_one():
    """The second function is a hundred times the first and says the opposite: their sum would say it alone."""
    parts = [[1.0, 0.0], [0.0, 100.0], [0.5, 50.0], [1.0, 0.0], [0.0, 100.0]]
    config = make_config("gdpo", functions=2)
    batch = compose(config).assign_credit(make_experience(parts=parts), Solo())
    weighted = doubles([1.0 - 2.0, -1.0 + 2.0, 0.0])  # each is +-1 deviation; the weights are 1 and 2
    first = batch.advantages_NT[:3, 0]
    assert ((first - first[2]) / (first[1] - first[2])).tolist() == pytest.approx(weighted.tolist(), abs=1e-5)


EQUAL = (1.0, 1.0, 1.0, 2.0, 2.5)
HALF = [False, False, False, True, True]
WHITENED = ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
SELECTING = ("clip_cov", "kl_cov")
BY_GROUP = ("grpo", "dr_grpo", "dapo", "gspo", "gmpo", "sapo", "cispo", "rloo", "opo", "gpg", "grpo_passk")


@pytest.mark.parametrize("name", [*WHITENED, *SELECTING, *BY_GROUP])
def test_what_has_signal(name):
    """A group of equal rewards has none, but where advantages are whitened or tokens chosen over the whole batch."""
    algorithm = compose(make_config(name))
    everyone = name in WHITENED + SELECTING
    assert algorithm.has_signal(make_experience(EQUAL)).tolist() == ([True] * 5 if everyone else HALF)
    unscored = make_experience(EQUAL, valid=(True, True, True, False, True))
    # The second group is left with one: nothing to compare with, so its reward is its advantage.
    expected = [True, True, True, False, True] if everyone else [False, False, False, False, True]
    assert algorithm.has_signal(unscored).tolist() == expected


def test_raft_learns_every_best_answer_and_none_of_a_group_without_one():
    algorithm = compose(make_config("raft"))
    experience = make_experience((1.0, 1.0, 0.0, 2.0, 2.0))
    assert algorithm.assign_credit(experience, Solo()).advantages_NT[:, 0].tolist() == [1, 1, 0, 0, 0]
    assert algorithm.has_signal(experience).tolist() == [True, True, False, False, False]
    unscored = make_experience((1.0, 5.0, 0.0, 2.0, 2.5), valid=(True, False, True, True, True))
    assert algorithm.assign_credit(unscored, Solo()).advantages_NT[:, 0].tolist() == [1, 0, 0, 0, 1]


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "dr_grpo", "grpo_passk", "raft", "remax"])
def test_without_signal_there_is_no_advantage(name):
    algorithm = compose(make_config(name))
    experience = make_experience(EQUAL, baseline=(1.0, 2.0))
    signal, batch = algorithm.has_signal(experience), algorithm.assign_credit(experience, Solo())
    assert not batch.advantages_NT[~signal].any()
    assert not signal.all()


def test_remax_has_signal_where_a_sample_differs_from_the_greedy_one():
    algorithm = compose(make_config("remax"))
    experience = make_experience(EQUAL, baseline=(1.0, 2.0))
    assert algorithm.has_signal(experience).tolist() == [False, False, False, False, True]
    one_other = make_experience(REWARDS, baseline=(0.5, 9.0), valid=UNSCORED)
    assert algorithm.has_signal(one_other).tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("name", ["grpo", "remax"])
def test_kl_in_the_reward_gives_every_scored_sample_signal(name):
    algorithm = compose(make_config(name, use_kl_in_reward=True))
    experience = make_experience(EQUAL, valid=UNSCORED, baseline=(1.0, 2.0))
    assert algorithm.has_signal(experience).tolist() == list(UNSCORED)


def test_the_deviation_is_the_one_with_n_minus_1():
    batch = compose(make_config("grpo")).assign_credit(make_experience((1.0, 0.0, 0.0, 3.0, 3.0)), Solo())
    assert batch.advantages_NT[0, 0].item() == pytest.approx((2 / 3) / (math.sqrt(1 / 3) + 1e-6), abs=1e-12)
