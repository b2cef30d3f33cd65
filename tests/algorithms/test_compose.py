"""Algorithms put together: every file by itself, parts replaced by verl's keys, mixes that are refused."""

import pytest
from credit_samples import make_config

from ullage.algorithms import clip_cov, dapo, dr_grpo, gmpo, gpg, grpo, gspo, kl_cov, ppo, remax, rloo, sapo
from ullage.algorithms._compose import compose, name_of
from ullage.base import extensions
from ullage.base.errors import ConfigError

NAMES = (
    "cispo", "clip_cov", "dapo", "dr_grpo", "gdpo", "gmpo", "gpg", "grpo", "grpo_passk", "gspo", "kl_cov", "opo", "ppo",
    "raft", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "sapo",
)  # fmt: skip
AGGREGATIONS = {
    "dr_grpo": "seq-mean-token-sum-norm",
    "gmpo": "seq-mean-token-mean",
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
}
NEEDS = {"ppo": {"critic"}, "remax": {"greedy_baseline"}}


def parts_of(algorithm):
    """The files its credit and its loss come from, and how it aggregates."""
    credit, loss = (type(part).__module__.rpartition(".")[2] for part in (algorithm.credit, algorithm.loss))
    return credit, loss, algorithm.aggregation


def test_these_are_all_files():
    assert extensions.known("algorithms") == sorted((*NAMES, "sft"))


def test_supervised_training_is_one_class():
    algorithm = compose(make_config("sft"))
    assert (algorithm.needs, algorithm.aggregation, algorithm.refills) == ({"completions"}, "token-mean", False)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_an_algorithm(name):
    module = extensions.find("algorithms", name)
    algorithm = compose(make_config(name))
    credit, loss, aggregation = parts_of(algorithm)
    assert credit == getattr(module, "CREDIT", name)
    assert loss == getattr(module, "LOSS", name)
    assert aggregation == AGGREGATIONS.get(name, "token-mean")
    assert algorithm.needs == NEEDS.get(name, set())
    assert algorithm.refills is (name == "dapo")
    assert algorithm.selects is (name in ("clip_cov", "kl_cov"))
    assert algorithm.state() == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_names_a_part_or_has_it_never_both(name):
    module = extensions.find("algorithms", name)
    for kind in ("Credit", "Loss"):
        assert hasattr(module, kind) != hasattr(module, kind.upper())


def test_nothing_given_is_grpo():
    config = make_config()
    assert name_of(config) == "grpo"
    assert parts_of(compose(config)) == ("grpo", "ppo", "token-mean")


@pytest.mark.parametrize(
    ("estimator", "name", "credit"),
    [
        ("gae", "ppo", ppo.Credit),
        ("grpo", "grpo", grpo.Credit),
        ("grpo_vectorized", "grpo", grpo.Credit),
        ("rloo", "rloo", rloo.Credit),
        ("rloo_vectorized", "rloo", rloo.Credit),
        ("remax", "remax", remax.Credit),
        ("gpg", "gpg", gpg.Credit),
    ],
)
def test_an_estimator_of_verl_alone_names_the_algorithm(estimator, name, credit):
    config = make_config(adv_estimator=estimator)
    assert name_of(config) == name
    assert type(compose(config).credit) is credit


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        ("vanilla", ppo.Loss), ("gspo", gspo.Loss), ("sapo", sapo.Loss), ("gpg", gpg.Loss), ("geo_mean", gmpo.Loss),
        ("clip_cov", clip_cov.Loss), ("kl_cov", kl_cov.Loss),
    ],
)  # fmt: skip
def test_a_loss_of_verl_replaces_the_algorithms(mode, loss):
    algorithm = compose(make_config("rloo", actor={"policy_loss": {"loss_mode": mode}}))
    assert type(algorithm.loss) is loss
    assert type(algorithm.credit) is rloo.Credit


@pytest.mark.parametrize(
    ("name", "estimator", "mode", "aggregation", "parts"),
    [
        ("grpo", None, "gspo", None, ("grpo", "gspo", "seq-mean-token-mean")),
        ("gspo", None, None, "token-mean", ("grpo", "gspo", "token-mean")),
        ("grpo", "rloo", None, None, ("rloo", "ppo", "token-mean")),
        ("ppo", "reinforce_plus_plus", None, None, ("reinforce_plus_plus", "ppo", "token-mean")),
        ("dr_grpo", None, None, None, ("dr_grpo", "ppo", "seq-mean-token-sum-norm")),
        ("dr_grpo", None, "geo_mean", None, ("dr_grpo", "gmpo", "seq-mean-token-mean")),
        ("dr_grpo", None, None, "token-sum", ("dr_grpo", "ppo", "token-sum")),
        ("grpo", None, "sapo", "seq-mean-token-mean", ("grpo", "sapo", "seq-mean-token-mean")),
        (None, "gae", "gspo", None, ("ppo", "gspo", "seq-mean-token-mean")),
    ],
)
def test_any_part_can_be_replaced(name, estimator, mode, aggregation, parts):
    actor = {"loss_agg_mode": aggregation, "policy_loss": {"loss_mode": mode}}
    assert parts_of(compose(make_config(name, actor=actor, adv_estimator=estimator))) == parts


def test_groups_are_refilled_where_the_config_says():
    assert compose(make_config("rloo", filter_groups={"enable": True})).refills is True
    assert compose(make_config("dapo", filter_groups={"enable": False})).refills is False
    assert compose(make_config("dapo", filter_groups={"max_num_gen_batches": 3})).refills is True


def test_clips_of_the_papers_unless_the_config_has_its_own():
    def clips(name, **actor):
        loss = compose(make_config(name, actor=actor)).loss
        return loss.clip_low, loss.clip_high

    own = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
    assert clips("grpo") == (0.2, 0.2)
    assert clips("grpo", clip_ratio=0.3) == (0.3, 0.3)
    assert clips("dapo") == (0.2, dapo.CLIP_HIGH) == (0.2, 0.28)
    assert clips("gspo") == gspo.Loss.paper_clip == (3e-4, 4e-4)
    assert clips("gmpo") == gmpo.Loss.paper_clip == (0.4, 0.4)
    for name in ("grpo", "dapo", "gspo", "gmpo", "cispo", "clip_cov"):
        assert clips(name, **own) == (0.1, 0.3)


def test_dr_grpo_never_divides():
    assert compose(make_config("dr_grpo", norm_adv_by_std_in_grpo=True)).credit.divide_by_std is False
    assert compose(make_config("grpo", norm_adv_by_std_in_grpo=False)).credit.divide_by_std is False
    assert isinstance(compose(make_config("dr_grpo")).credit, dr_grpo.Credit)


@pytest.mark.parametrize("name", ["sapo", "gmpo"])
@pytest.mark.parametrize("by_key", [True, False])
def test_a_loss_per_sequence_has_one_aggregation(name, by_key):
    mode = {"sapo": "sapo", "gmpo": "geo_mean"}[name]
    actor = {"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": mode if by_key else None}}
    with pytest.raises(ConfigError) as refused:
        compose(make_config("grpo" if by_key else name, actor=actor))
    assert refused.value.cause == (
        "actor_rollout_ref.actor.loss_agg_mode = token-mean: this loss is defined per sequence"
    )
    assert refused.value.remedy == "set it to seq-mean-token-mean, or leave it out"


@pytest.mark.parametrize("name", [None, "grpo"])
def test_an_estimator_that_has_no_credit_is_refused(name):
    with pytest.raises(ConfigError) as refused:
        compose(make_config(name, adv_estimator="gspo"))
    assert refused.value.cause == "algorithm.adv_estimator = gspo: gspo has no advantage estimator of its own"
    assert refused.value.remedy == "leave algorithm.adv_estimator out; algorithm=gspo is the whole of it"


def test_a_loss_mode_that_has_no_loss_is_refused():
    with pytest.raises(ConfigError) as refused:
        compose(make_config("grpo", actor={"policy_loss": {"loss_mode": "rloo"}}))
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    assert refused.value.cause == f"{key} = rloo: rloo has no policy loss of its own"


@pytest.mark.parametrize(
    "options", [{"name": "no_such"}, {"adv_estimator": "no_such"}, {"actor": {"policy_loss": {"loss_mode": "no_such"}}}]
)
def test_an_unknown_name_lists_the_known(options):
    with pytest.raises(ConfigError, match="no algorithms part called 'no_such'") as refused:
        compose(make_config(**options))
    assert ", ".join(sorted(NAMES)) in refused.value.remedy


def test_gdpo_has_no_place_for_penalties_on_the_sum():
    with pytest.raises(ConfigError, match="use_kl_in_reward = true: gdpo looks at each reward function by itself"):
        compose(make_config("gdpo", use_kl_in_reward=True))
    config = make_config("gdpo")
    reward = config.reward.model_validate({"overlong_buffer": {"length": 4}})
    with pytest.raises(ConfigError, match=r"reward\.overlong_buffer: gdpo looks at each reward function by itself"):
        compose(config.model_copy(update={"reward": reward}))
