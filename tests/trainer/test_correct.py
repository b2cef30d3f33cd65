"""Rollout correction of a step: weights, rejection and bypass, with numbers by hand."""

import math

import pytest
import torch

from experience_samples import load, make_config, make_experience, make_train_batch, stay_double
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.base.errors import ConfigError
from ullage.batch.pack import Limits
from ullage.batch.stages import Rollouts
from ullage.config.check import not_yet
from ullage.config.load import load_mapping
from ullage.config.tree import RolloutCorrection
from ullage.telemetry.tally import Tally
from ullage.trainer.correct import Bounds, Corrector, bounds_of, rules_of
from ullage.workers.actor import Actor

LN2 = math.log(2)
# log rho = old - rollout: [ln 2, 0, -ln 2], [ln 4, ln 4, padding], [without signal]
OLD = [[LN2, 0.0, -LN2], [2 * LN2, 2 * LN2, 0.0], [0.0, 0.0, 0.0]]


@pytest.fixture(scope="module")
def tiny_float64(tiny_model):
    return load(tiny_model)


def make(old=OLD, signal=(True, True, False)):
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    rollouts = Rollouts(
        prompts=((5,),),
        order_G=torch.tensor([0]),
        group_N=torch.zeros(3, dtype=torch.long),
        sample_N=torch.arange(3),
        responses=((1, 2, 3), (1, 2), (1, 2, 3)),
        mask_NT=mask,
        rollout_logprobs_NT=torch.where(mask, -3.0, 0.0).double(),
        finish_reasons=("stop",) * 3,
    )
    experience = rollouts.scored(rewards_N=torch.tensor([1.0, 0.0, 1.0]), valid_N=torch.ones(3, dtype=torch.bool))
    experience = experience.with_signal(torch.tensor(signal))
    old_logprobs = torch.where(mask, torch.tensor(old, dtype=torch.float64) - 3.0, 0.0)
    return experience.evaluated(old_logprobs=old_logprobs, ref_logprobs=None, values=None)


def apply(experience=None, *, exact_engine=True, **settings):
    corrector = Corrector(RolloutCorrection(**settings), Solo(), exact_engine=exact_engine)
    tally = Tally()
    return corrector.apply(experience or make(), tally), tally.means(Solo())


def test_nothing_to_correct_where_the_engine_reads_the_trainers_weights():
    experience = make()
    corrected, report = apply(experience, exact_engine=True)
    assert corrected is experience
    assert report == {}


def test_another_engine_is_corrected_by_default():
    corrected, report = apply(exact_engine=False)
    want = [[2.0, 1.0, 0.5], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]  # rho = 4 is truncated to 2
    torch.testing.assert_close(corrected.correction_NT, torch.tensor(want).double(), rtol=1e-15, atol=0)
    assert report == {"rollout/correction_mean": pytest.approx(7.5 / 5), "rollout/rejected_fraction": 0.0}
    off, _ = apply(exact_engine=False, rollout_is=None)
    assert off.correction_NT is None


def test_weights_of_whole_sequences():
    corrected, _ = apply(rollout_is="sequence", rollout_is_threshold=10.0)
    want = [[1.0, 1.0, 1.0], [10.0, 10.0, 0.0], [0.0, 0.0, 0.0]]  # products 2 * 1 * 0.5 and 4 * 4 = 16
    torch.testing.assert_close(corrected.correction_NT, torch.tensor(want).double(), rtol=1e-15, atol=0)


def test_two_bounds_drop_what_lies_outside():
    corrected, _ = apply(rollout_is="token", rollout_is_threshold="0.6_3.0")
    want = [[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(corrected.correction_NT, torch.tensor(want).double(), rtol=1e-15, atol=0)


def test_normalised_weights_have_mean_one():
    corrected, report = apply(rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=True)
    assert corrected.correction_NT[0].tolist() == pytest.approx([4 / 3, 2 / 3, 1 / 3], rel=1e-8)
    assert report["rollout/correction_mean"] == pytest.approx(1.0, rel=1e-8)


def test_rejected_tokens_carry_no_loss_and_samples_without_signal_stay():
    corrected, report = apply(
        rollout_rs="token_k2", rollout_rs_threshold=0.3
    )  # (ln 2)^2 / 2 = 0.24, (ln 4)^2 / 2 = 0.96
    assert corrected.mask_NT.int().tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert corrected.correction_NT is None
    assert report == {"rollout/rejected_fraction": pytest.approx(2 / 5)}


def test_several_rules_must_all_agree():
    corrected, _ = apply(rollout_rs="token_k1, seq_max_k2", rollout_rs_threshold="0.9_4.0, 0.3")
    # k1 = -log rho within [ln 0.9, ln 4]: the first token (-ln 2) is out; the second sequence fails by its maximum.
    assert corrected.mask_NT.int().tolist() == [[0, 1, 1], [0, 0, 0], [1, 1, 1]]


def test_a_rejected_sequence_still_counts_in_its_group():
    config = make_config()
    experience = make(signal=(True, True, True))
    corrected, _ = apply(experience, rollout_rs="seq_max_k2", rollout_rs_threshold=0.3)
    with_all = make_train_batch(experience, config).advantages_NT
    without = make_train_batch(corrected, config).advantages_NT
    assert without[0].tolist() == with_all[0].tolist()
    assert without[1].tolist() == [0.0, 0.0, 0.0]


def test_bounds_and_rules_are_read_as_written():
    assert bounds_of(2.0) == Bounds(2.0)
    assert bounds_of("0.5_5") == Bounds(5.0, 0.5)
    assert rules_of("token_k1, seq_sum_k3", 2.0) == [("token_k1", Bounds(2.0)), ("seq_sum_k3", Bounds(2.0))]
    assert rules_of(None, None) == []


def test_the_loss_is_weighted_token_by_token(tiny_float64):
    """One token's weight of 3 triples the gradient of that token's term and of nothing else."""
    config = make_config("rloo")
    experience = make_experience(tiny_float64)
    sample, token = 0, 2

    def gradient(weight):
        weights = torch.ones_like(experience.old_logprobs_NT)
        weights[sample, token] = weight
        corrected = experience.corrected(mask_NT=experience.mask_NT, correction_NT=weights)
        actor = Actor(tiny_float64, config.actor_rollout_ref.actor, Limits(max_tokens=64), Solo(), temperature=1.0)
        actor.optimizer.zero_grad()
        actor.backward(make_train_batch(corrected, config), compose(config))
        return actor.optimizer.gradient.clone()

    with stay_double():
        none, once, thrice = gradient(0.0), gradient(1.0), gradient(3.0)
    assert (once - none).norm() > 0
    torch.testing.assert_close(thrice - none, 3 * (once - none), rtol=1e-8, atol=1e-12)


def test_a_loss_of_sequences_takes_the_sequences_weight(tiny_float64):
    """GMPO: the geometric mean of the weights 4, 1, 1, ... over a sequence of n tokens is 4 ** (1 / n)."""
    config = make_config("gmpo")
    experience = make_experience(tiny_float64)
    rows = (experience.mask_NT.any(-1) & experience.valid_N).nonzero()[:, 0]
    row = int(rows[experience.mask_NT[rows].sum(-1) == 5][0])

    def loss(weights):
        corrected = experience.corrected(mask_NT=experience.mask_NT, correction_NT=weights)
        actor = Actor(tiny_float64, config.actor_rollout_ref.actor, Limits(max_tokens=64), Solo(), temperature=1.0)
        return float(actor.backward(make_train_batch(corrected, config), compose(config)).loss)

    ones = torch.ones_like(experience.old_logprobs_NT)
    first, whole, nothing = ones.clone(), ones.clone(), ones.clone()
    first[row, 0] = 4.0
    whole[row] = 4.0 ** (1 / 5)
    nothing[row] = 0.0
    assert loss(first) == pytest.approx(loss(whole), rel=1e-9)
    assert loss(first) != pytest.approx(loss(ones), rel=1e-6)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("rollout_is_threshold=many", 'must be a number above 0, or two as "low_high"'),
        ("rollout_is_threshold=3_2", 'must be a number above 0, or two as "low_high"'),
        ("rollout_rs=token_k9", "unknown rule token_k9; known are token_k1"),
        ("rollout_rs=token_k1", "needs one bound for all or one each"),
    ],
)
def test_wrong_settings_are_refused(override, rule):
    with pytest.raises(ConfigError, match=rule):
        load_mapping({}, [f"algorithm.rollout_correction.{override}"])


def test_bypass_computes_nothing_to_compare_with():
    path = "algorithm.rollout_correction."
    (problem,) = not_yet(load_mapping({}, [path + "bypass_mode=true", path + "rollout_is=token"]).config)
    assert str(problem).startswith("algorithm.rollout_correction.rollout_is = 'token': compares with the trainer's own")
    corrector = Corrector(RolloutCorrection(bypass_mode=True), Solo(), exact_engine=False)
    assert (corrector.bypass, corrector.compares) == (True, False)
