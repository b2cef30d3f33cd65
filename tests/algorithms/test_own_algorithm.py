"""Algorithms of a user's own: one class, or parts in a file; what is missing is said before a run starts."""

import pytest
import torch
from credit_samples import make_config, make_experience, numbers

from ullage.algorithms import grpo, ppo
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.base.errors import ConfigError

WHOLE = """
from ullage.algorithms import TokenLoss, WholeAlgorithm

class Algorithm(WholeAlgorithm):
    def assign_credit(self, experience, ranks):
        return experience.credited(advantages_NT=experience.rewards_N[:, None] * experience.mask_NT)

    def policy_loss(self, logprobs_NT, old_logprobs_NT, batch):
        return TokenLoss(-batch.advantages_NT * logprobs_NT, {})
"""


@pytest.fixture
def write(tmp_path):
    def file(text, name="mine.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return file


def test_one_class_is_an_algorithm(write):
    algorithm = compose(make_config(write(WHOLE)))
    batch = algorithm.assign_credit(make_experience(), Solo())
    assert batch.advantages_NT[:, 0].tolist() == [1.0, 0.0, 0.5, 2.0, 2.5]
    logprobs = numbers(1)
    assert torch.equal(algorithm.policy_loss(logprobs, logprobs, batch).loss_NT, -batch.advantages_NT * logprobs)
    assert algorithm.has_signal(make_experience(valid=(True, False, True, True, True))).tolist() == [
        True, False, True, True, True
    ]  # fmt: skip
    assert (algorithm.needs, algorithm.aggregation, algorithm.refills) == (frozenset(), "token-mean", False)
    assert (algorithm.selects, algorithm.state()) == (False, {})
    algorithm.restore({})


def test_keys_that_are_no_part_of_it_apply_to_it_too(write):
    config = make_config(write(WHOLE), actor={"loss_agg_mode": "token-sum"}, filter_groups={"enable": True})
    algorithm = compose(config)
    assert (algorithm.aggregation, algorithm.refills) == ("token-sum", True)
    assert algorithm.config is config


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (
            {"adv_estimator": "rloo"},
            "algorithm.adv_estimator = rloo: {} is one class, its advantage estimator is fixed",
        ),
        (
            {"actor": {"policy_loss": {"loss_mode": "gspo"}}},
            "actor_rollout_ref.actor.policy_loss.loss_mode = gspo: {} is one class, its policy loss is fixed",
        ),
        ({"use_kl_in_reward": True}, "algorithm.use_kl_in_reward = true: {} is one class and assigns its own credit"),
    ],
)
def test_keys_it_would_ignore_are_refused(write, options, cause):
    file = write(WHOLE)
    with pytest.raises(ConfigError) as refused:
        compose(make_config(file, **options))
    assert refused.value.cause == cause.format(file)


def test_a_class_without_its_two_methods_is_refused(write):
    file = write("from ullage.algorithms import WholeAlgorithm\nclass Algorithm(WholeAlgorithm): ...\n")
    with pytest.raises(ConfigError) as refused:
        compose(make_config(file))
    assert refused.value.cause == f"{file}: class Algorithm has no assign_credit and no policy_loss"


def test_selecting_without_a_prepare_singles_out_nothing(write):
    algorithm = compose(make_config(write(WHOLE + "    selects = True\n")))
    assert algorithm.selects
    batch = algorithm.assign_credit(make_experience(), Solo())
    assert algorithm.prepare(batch, numbers(1), Solo(), 0) is batch


CREDIT = """
from ullage.algorithms import grpo
class Credit(grpo.Credit):
    pass
"""


def test_a_file_with_one_part_names_the_other(write):
    algorithm = compose(make_config(write('LOSS = "ppo"\n' + CREDIT)))
    assert isinstance(algorithm.credit, grpo.Credit)
    assert type(algorithm.loss) is ppo.Loss


def test_a_file_is_loaded_once(write, tmp_path):
    count = (
        f"from pathlib import Path\nwith Path({str(tmp_path / 'count')!r}).open('a') as file:\n    file.write('x')\n"
    )
    compose(make_config(write(count + 'LOSS = "ppo"\n' + CREDIT)))
    assert (tmp_path / "count").read_text() == "x"


def test_a_part_that_is_nowhere_is_refused(write):
    file = write(CREDIT)
    with pytest.raises(ConfigError) as refused:
        compose(make_config(file))
    assert refused.value.cause == (
        f"{file} has no policy loss: neither a class Loss nor LOSS, the name of a file with one"
    )
    assert refused.value.remedy == "add one of them, or set actor_rollout_ref.actor.policy_loss.loss_mode"
    algorithm = compose(make_config(file, actor={"policy_loss": {"loss_mode": "vanilla"}}))
    assert type(algorithm.loss) is ppo.Loss


def test_a_file_as_one_part_of_an_algorithm(write):
    algorithm = compose(make_config("gspo", adv_estimator=write(CREDIT)))
    assert type(algorithm.credit).__module__.startswith("ullage_user_mine_")
    assert algorithm.aggregation == "seq-mean-token-mean"


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no such Python file"):
        compose(make_config(str(tmp_path / "none.py")))
