"""Supervised training in the loop: the loss is the likelihood, and evaluation measures it by source."""

import math

import pytest
import torch

from experience_samples import load
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.batch.pack import Limits
from ullage.config.tree import Config
from ullage.data.completions import Demonstration
from ullage.data.prompts import Prompt
from ullage.data.sampler import Sampler
from ullage.telemetry.tally import Tally
from ullage.trainer.demonstrate import DemonstrationCollector, LossEvaluator, to_experience
from ullage.trainer.schedule import Schedule
from ullage.workers.actor import Actor

ROWS = [((5, 6, 7), (8, 9, 2)), ((5, 9), (4, 2)), ((6,), (10, 11, 12, 2)), ((7, 7), (2,))]


class Quiet:
    """A recorder that only opens phases."""

    def phase(self, name):
        from contextlib import nullcontext

        return nullcontext()

    def progress(self, done, total, note):
        pass


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model)


@pytest.fixture(scope="module")
def demonstrations():
    return [
        Demonstration(
            prompt=Prompt(id=i, token_ids=ids, prompt="", target=None, source="ab"[i % 2], extra={}), response=response
        )
        for i, (ids, response) in enumerate(ROWS)
    ]


def likelihood(model, demonstration):
    """By transformers' own forward, one at a time."""
    ids = torch.tensor([[*demonstration.prompt.token_ids, *demonstration.response]])
    module = type(model.module)(
        model.module.config.__class__(**{**model.module.config.to_dict(), "attn_implementation": "eager"})
    ).double()
    module.load_state_dict(model.module.state_dict())
    with torch.no_grad():
        logprobs = module(ids).logits[0].log_softmax(-1)
    first = len(demonstration.prompt.token_ids)
    return sum(logprobs[place - 1, int(ids[0, place])].item() for place in range(first, ids.shape[1]))


def make_actor(model):
    config = Config.model_validate({"algorithm": {"name": "sft"}, "data": {"train_batch_size": 4}})
    return config, Actor(model, config.actor_rollout_ref.actor, Limits(max_tokens=64), Solo(), temperature=1.0)


def test_the_loss_is_the_mean_negative_log_likelihood_of_a_token(model, demonstrations):
    config, actor = make_actor(model)
    algorithm = compose(config)
    collector = DemonstrationCollector(demonstrations, Sampler(4, 4, seed=1, shuffle=True), Solo())
    experience = collector.collect(1, tally := Tally())
    batch = algorithm.assign_credit(experience, Solo())
    (mini_batch,) = Schedule(config, algorithm.aggregation, Solo()).mini_batches(batch, step=1)
    loss = float(actor.backward(mini_batch, algorithm).loss)
    total = sum(likelihood(model, demonstration) for demonstration in demonstrations)
    assert loss == pytest.approx(-total / 10, rel=1e-6)
    assert tally.means(Solo()) == {"response/length_mean": 2.5}


def test_every_rank_takes_its_share(demonstrations):
    class Second(Solo):
        rank, size = 1, 2

    collector = DemonstrationCollector(demonstrations, Sampler(4, 4, seed=1, shuffle=False), Second())
    experience = collector.collect(1, Tally())
    assert experience.responses == (ROWS[1][1], ROWS[3][1])
    assert experience.order_G.tolist() == [1, 3]


def test_evaluation_is_by_source_and_better_is_higher(model, demonstrations):
    _, actor = make_actor(model)
    result = LossEvaluator(demonstrations, actor, Solo(), Quiet(), rewards=None).evaluate(3)
    logs = [likelihood(model, demonstration) for demonstration in demonstrations]
    assert result.metrics == {
        "eval/a/loss": pytest.approx(-(logs[0] + logs[2]) / 7, rel=1e-6),
        "eval/b/loss": pytest.approx(-(logs[1] + logs[3]) / 3, rel=1e-6),
    }
    assert result.score == pytest.approx(math.fsum(logs) / 10, rel=1e-6)


def test_given_answers_have_no_engines_log_probs(demonstrations):
    experience = to_experience(demonstrations, range(4))
    assert experience.rollout_logprobs_NT is None
    assert experience.select(torch.tensor([2])).responses == (ROWS[2][1],)
