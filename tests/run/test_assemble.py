"""From config keys to limits, slots and the line that says how batch sizes combine."""

from contextlib import nullcontext

import pytest

from make_tiny_model import make_tiny_model
from ullage.base.communicator import Solo
from ullage.base.errors import ConfigError, ModelError
from ullage.batch.pack import Limits
from ullage.config.settle import plainly, with_key
from ullage.config.tree import Config
from ullage.data.prompts import Prompt, PromptSet
from ullage.model.load import load_model
from ullage.model.target import Target
from ullage.run.assemble import derivation
from ullage.run.roles import make_critic, make_limits
from ullage.run.supply import longest_prompt, make_engine, num_evaluated
from ullage.workers.actor import Actor

CPU = Target("cpu", 0, (0, 0), 8 << 30)


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_model(str(tiny_model), CPU)


def make_config(*, actor=None, rollout=None, **data):
    given = {"data": data, "actor_rollout_ref": {"actor": actor or {}, "rollout": rollout or {}}}
    return plainly(Config.model_validate(given), "cpu")


@pytest.mark.parametrize(
    ("data", "actor", "tokens", "sequences"),
    [
        ({"max_prompt_length": 100, "max_response_length": 28}, {}, 8192, None),
        ({"max_prompt_length": 8000, "max_response_length": 1000}, {}, 9000, None),  # one sequence must always fit
        ({}, {"ppo_max_token_len_per_gpu": 2048, "ppo_micro_batch_size_per_gpu": 3}, 2048, 3),
    ],
)
def test_limits_of_a_pass(data, actor, tokens, sequences):
    limits = make_limits(make_config(actor=actor, **data))
    assert (limits.max_tokens, limits.max_sequences) == (tokens, sequences)
    assert limits.share_prefix


def prompt_set(*lengths):
    prompts = tuple(
        Prompt(id=n, token_ids=(5,) * length, prompt="", target=None, source="", extra={})
        for n, length in enumerate(lengths)
    )
    return PromptSet(prompts=prompts, fingerprint="", num_rows=len(prompts), num_overlong=0, overlong="drop")


def test_slots_and_room_are_no_more_than_the_data_needs(model):
    train, val = prompt_set(4, 7), prompt_set(9, 1)
    assert (longest_prompt(train, None), longest_prompt(train, val)) == (7, 9)
    config = make_config(max_response_length=10, rollout={"max_num_seqs": 6, "val_kwargs": {"n": 4}})
    assert (num_evaluated(config, val), num_evaluated(config, None)) == (8, 0)
    engine = make_engine(config, model, prompt_tokens=9, samples=5, n=4)
    assert (engine.slots, engine.max_length) == (5, 19)
    shared = make_engine(config, model, prompt_tokens=40, samples=5, n=4)
    assert shared.pages.total == 2 * 3 + 5 * 3, (
        "two prompts of three pages; each sample's own, one free, one for its copy"
    )
    assert make_engine(config, model, prompt_tokens=9, samples=8, n=4).slots == 6
    for key, value in (("environment.name", "tools"), ("actor_rollout_ref.rollout.deterministic", True)):
        apart = make_engine(with_key(config, key, value), model, prompt_tokens=40, samples=5, n=4)
        assert apart.pages.total == 5 * (4 + 1), "turns begin on their own, and nobody makes room for another"


def test_how_the_batch_sizes_combine():
    config = make_config(train_batch_size=10, actor={"ppo_mini_batch_size": 4, "ppo_epochs": 2}, rollout={"n": 5})
    assert derivation(config, 2) == (
        "each step: 10 prompts x 5 samples = 50 sequences on 2 rank(s), 6 optimizer update(s) of 4 prompts"
    )


class FakeAlgorithm:
    def __init__(self, *needs):
        self.needs = frozenset(needs)


def critic_of(actor_model, algorithm, **critic):
    """What a run with these critic settings would train beside the actor."""
    path = str(actor_model.module.name_or_path)
    given = {"actor_rollout_ref": {"model": {"path": path}}, "critic": critic}
    config = plainly(Config.model_validate(given), "cpu")
    actor = Actor(actor_model, config.actor_rollout_ref.actor, Limits(max_tokens=99), Solo(), temperature=1.0, seed=1)
    return make_critic(config, algorithm, actor, nullcontext)


def test_there_is_a_critic_where_one_is_needed_or_wanted(model):
    assert critic_of(model, FakeAlgorithm()) is None
    assert critic_of(model, FakeAlgorithm(), enable=False) is None
    assert critic_of(model, FakeAlgorithm("critic")).limits.max_tokens == 99
    assert critic_of(model, FakeAlgorithm(), enable=True, ppo_max_token_len_per_gpu=50).limits.max_tokens == 50
    with pytest.raises(ConfigError, match="the algorithm needs a critic"):
        critic_of(model, FakeAlgorithm("critic"), enable=False)


def test_a_critic_has_a_trunk_of_its_own_or_the_actors(model):
    assert critic_of(model, FakeAlgorithm("critic"), share_actor=True).model.trunk is model
    own = critic_of(model, FakeAlgorithm("critic")).model.trunk
    places = {parameter.data_ptr() for parameter in model.module.parameters()}
    assert places.isdisjoint(parameter.data_ptr() for parameter in own.module.parameters())


def test_a_critic_must_know_the_actors_tokens(model, tmp_path):
    smaller = make_tiny_model(tmp_path / "smaller", alphabet="0123456789")
    with pytest.raises(ModelError, match=r"knows 14 tokens, the actor's 36") as caught:
        critic_of(model, FakeAlgorithm("critic"), model={"path": str(smaller)})
    assert "critic.model.path" in caught.value.remedy
    with pytest.raises(ModelError, match="the critic's model: no such model folder: /no/such/folder"):
        critic_of(model, FakeAlgorithm("critic"), model={"path": "/no/such/folder"})
