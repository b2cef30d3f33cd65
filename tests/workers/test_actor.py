"""The actor: its loss and gradient against a plain one written out here, its reports, and skipped updates."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from experience_samples import load, make_config, make_experience, make_train_batch, stay_double
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.base.errors import NumericsError
from ullage.batch.pack import Limits
from ullage.telemetry.tally import Tally
from ullage.workers.actor import Actor, Terms
from ullage.workers.reference import Reference

LIMITS = Limits(max_tokens=100)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model)


@pytest.fixture(scope="module")
def experience(model):
    return make_experience(model, temperature=TEMPERATURE)


def make_actor(model, config, limits=LIMITS):
    return Actor(model, config.actor_rollout_ref.actor, limits, Solo(), temperature=TEMPERATURE)


def plain_loss(module, experience, advantages_NT, settings):
    """GRPO's loss by the book: one sequence at a time, all logits, token-mean over the whole batch."""
    total, count = 0.0, int(experience.mask_NT.sum())
    for i, response in enumerate(experience.responses):
        prompt = experience.prompts[int(experience.group_N[i])]
        logits = module(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        for t in range(len(response)):
            if not experience.mask_NT[i, t]:
                continue
            advantage = advantages_NT[i, t]
            ratio = (chosen[t] - experience.old_logprobs_NT[i, t]).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if advantage < 0:
                loss = loss.clamp(max=-3.0 * advantage)
            difference = experience.ref_logprobs_NT[i, t] - chosen[t]
            divergence = difference.exp() - difference - 1
            total = total + (loss + settings.kl_loss_coef * divergence - settings.entropy_coeff * entropy[t]) / count
    return total


@pytest.mark.invariant
def test_loss_and_gradient_equal_the_plain_ones(tiny_model, model, experience):
    config = make_config(use_kl_loss=True, kl_loss_coef=0.05, entropy_coeff=0.02)
    batch = make_train_batch(experience, config)
    actor = make_actor(model, config)
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64, attn_implementation="eager").eval()
    with stay_double():
        terms = actor.backward(batch, compose(config))
        credit = compose(config).assign_credit(experience, Solo()).advantages_NT
        want = plain_loss(theirs, experience, credit, config.actor_rollout_ref.actor)
        want.backward()
    assert sum(1 for _ in actor.losses(batch, compose(config))) > 1
    assert float(terms.loss) == pytest.approx(want.item(), rel=1e-10)
    gradient = torch.cat([parameter.grad.flatten() for _, parameter in theirs.named_parameters()])
    assert actor.optimizer.names == tuple(name for name, _ in theirs.named_parameters())
    difference = torch.linalg.vector_norm(actor.optimizer.gradient - gradient)
    assert difference <= 1e-10 * torch.linalg.vector_norm(gradient)


def test_update_reports_token_means_and_the_norm(model, tiny_model, experience):
    config = make_config(use_kl_loss=True, entropy_coeff=0.02)
    batch = make_train_batch(experience, config)
    actor, tally = make_actor(load(tiny_model), config), Tally()
    terms = make_actor(model, config).backward(batch, compose(config))
    actor.update(batch, compose(config), 1e-3, tally)
    means = tally.means(Solo())
    count = int(batch.mask_NT.sum())
    for name in ("actor/entropy", "actor/kl_ref", "actor/clip_fraction", "rollout/logprob_gap_mean"):
        assert means[name] == pytest.approx(float(terms.report[name][0]) / count, rel=1e-9), name
    assert means["actor/loss"] == pytest.approx(float(terms.loss), rel=1e-9)
    assert means["actor/skipped_steps"] == 0.0
    assert means["actor/grad_norm"] > 0


@pytest.mark.invariant
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("limits", [LIMITS, Limits(max_tokens=400, max_sequences=3, share_prefix=False)])
def test_the_first_ratio_is_exactly_one(tiny_model, dtype, limits):
    model = load(tiny_model, dtype)
    config = make_config()
    scored = make_experience(model, temperature=TEMPERATURE)
    actor = make_actor(model, config, limits)
    everyone = torch.arange(len(scored.responses))
    evaluated = scored.evaluated(old_logprobs=actor.logprobs(scored, [everyone]), ref_logprobs=None, values=None)
    batch = make_train_batch(evaluated, config)
    terms = actor.backward(batch, compose(config))
    assert float(terms.report["actor/kl_old"][0]) == 0.0
    assert float(terms.report["actor/clip_fraction"][0]) == 0.0


@pytest.mark.invariant
def test_no_old_logprobs_means_the_updates_own(model, experience):
    config = make_config()
    actor = make_actor(model, config)
    everyone = torch.arange(len(experience.responses))
    own = actor.logprobs(experience, [everyone])
    gradients = []
    for old in (own, None):
        evaluated = experience.evaluated(old_logprobs=old, ref_logprobs=None, values=None)
        actor.optimizer.zero_grad()
        actor.backward(make_train_batch(evaluated, config), compose(config))
        gradients.append(actor.optimizer.gradient.clone())
    assert torch.equal(*gradients)
    assert gradients[0].abs().sum() > 0


def test_logprobs_of_masked_tokens_are_zero(model, experience):
    actor = make_actor(model, make_config())
    logprobs = actor.logprobs(experience, [torch.arange(8), torch.arange(8, 16)])
    assert (logprobs[experience.mask_NT] < 0).all()
    assert logprobs[~experience.mask_NT].abs().sum() == 0


def test_samples_outside_every_mini_batch_are_not_forwarded(model, experience):
    actor = make_actor(model, make_config())
    whole = actor.logprobs(experience, [torch.arange(16)])
    part = actor.logprobs(experience, [torch.tensor([1, 14]), torch.tensor([5])])
    chosen = torch.tensor([1, 5, 14])
    torch.testing.assert_close(part[chosen], whole[chosen], rtol=0, atol=1e-6)
    others = [i for i in range(16) if i not in (1, 5, 14)]
    assert part[others].abs().sum() == 0


def test_non_finite_updates_are_skipped_counted_and_budgeted(tiny_model, experience):
    config = make_config(max_nonfinite_steps=1, optim={"lr": 1e-2})
    model = load(tiny_model)
    actor, tally = make_actor(model, config), Tally()
    batch = make_train_batch(experience, config)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])
    broken = batch.weighted(torch.full_like(batch.weights_NT, math.inf))
    actor.update(broken, compose(config), 1e-2, tally)
    after = torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])
    assert torch.equal(weights, after)
    actor.update(batch, compose(config), 1e-2, tally)
    assert tally.means(Solo())["actor/skipped_steps"] == 0.5
    with pytest.raises(NumericsError, match="2 updates had a non-finite gradient"):
        actor.update(broken, compose(config), 1e-2, tally)


def test_a_second_update_forgets_the_first_gradient(tiny_model, experience):
    config = make_config(optim={"lr": 1e-9, "weight_decay": 0.0})
    actor = make_actor(load(tiny_model), config)
    batch = make_train_batch(experience, config)
    norms = []
    for _ in range(2):
        tally = Tally()
        actor.update(batch, compose(config), 1e-9, tally)
        norms.append(tally.means(Solo())["actor/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_reference_is_frozen_and_agrees_with_the_actor(tiny_model, model, experience):
    reference = Reference(load(tiny_model), LIMITS, temperature=TEMPERATURE)
    assert not any(parameter.requires_grad for parameter in reference.model.module.parameters())
    everyone = [torch.arange(16)]
    want = make_actor(model, make_config()).logprobs(experience, everyone)
    assert torch.equal(reference.logprobs(experience, everyone), want)


def test_phases_are_opened_under_their_names(model, experience):
    opened = []

    class Phase:
        def __init__(self, name):
            opened.append(name)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    settings = make_config().actor_rollout_ref.actor
    Actor(model, settings, LIMITS, Solo(), temperature=1.0, phase=Phase).logprobs(experience, [])
    Reference(model, LIMITS, temperature=1.0, phase=Phase).logprobs(experience, [])
    assert opened == ["logprob", "reference"]
    for parameter in model.module.parameters():
        parameter.requires_grad_(True)


def test_sums_of_micro_batches_are_over_the_tokens_that_they_speak_of():
    """A loss of one's own may report a number of some micro-batches only."""
    one, two, three = (torch.tensor(float(number)) for number in (1, 2, 3))
    first = Terms(one, {"both": (one, 10), "first": (two, 10)}, 10)
    second = Terms(two, {"both": (three, 5), "second": (one, 5)}, 5)
    total = first.plus(second)
    assert (float(total.loss), total.tokens) == (3.0, 15)
    report = {name: (float(value), tokens) for name, (value, tokens) in total.report.items()}
    assert report == {"both": (4.0, 15), "first": (2.0, 10), "second": (1.0, 5)}
    assert first.report.keys() == {"both", "first"}
