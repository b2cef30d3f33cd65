"""The critic: its loss and gradient against plain ones, what it learns, its reports, and skipped updates."""

import dataclasses
import math

import pytest
import torch
from transformers import AutoModel

from experience_samples import CPU, load, make_rollouts, stay_double
from ullage.base.communicator import Solo
from ullage.base.errors import ConfigError, NumericsError
from ullage.batch.pack import Limits
from ullage.config.tree import Config
from ullage.maths.critic import value_loss
from ullage.model.value_model import load_value_model, share_trunk
from ullage.telemetry.tally import Tally
from ullage.trainer.schedule import Schedule
from ullage.workers.critic import Critic

LIMITS = Limits(max_tokens=100)
EVERYONE = [torch.arange(16)]


def config_of(**critic):
    data = {"train_batch_size": 4, "max_response_length": 16}
    return Config.model_validate({"data": data, "critic": critic})


def make_critic(folder, *, shared=False, dtype="float64", limits=LIMITS, config=None, **options):
    model = share_trunk(load(folder, dtype)) if shared else load_value_model(str(folder), CPU, dtype=dtype)
    return Critic(model, (config or config_of()).critic, limits, Solo(), max_nonfinite_steps=1, **options)


def make_batch(critic, config, *, returns=None):
    """A mini-batch whose old values are near the critic's, so that some are clipped."""
    experience = make_rollouts().scored(rewards_N=torch.zeros(16), valid_N=torch.ones(16, dtype=torch.bool))
    values = critic.values(experience, EVERYONE)
    generator = torch.Generator().manual_seed(2)
    noise = [torch.randn(values.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    experience = experience.evaluated(old_logprobs=None, ref_logprobs=None, values=values + 0.5 * noise[0])
    batch = experience.credited(
        advantages_NT=torch.zeros_like(noise[0]), returns_NT=noise[1] if returns is None else returns
    )
    (mini_batch,) = Schedule(config, "token-mean", Solo()).mini_batches(batch, step=0)
    return mini_batch


def turn_head(critic):
    """A head that is not zero, so that the trunk has a gradient."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        critic.model.weight.copy_(torch.randn(critic.model.weight.shape, generator=generator) / 8)
    return critic


def plain_loss(module, head, batch, clip):
    """By the book: one sequence at a time, the mean over all tokens of half the larger squared error."""
    total, count = 0.0, int(batch.mask_NT.sum())
    for i, response in enumerate(batch.responses):
        prompt = batch.prompts[int(batch.group_N[i])]
        hidden = module(torch.tensor([prompt + response])).last_hidden_state[0]
        for t in range(len(response)):
            if batch.mask_NT[i, t]:
                value = head(hidden[len(prompt) + t - 1])[0]
                old, target = batch.values_NT[i, t], batch.returns_NT[i, t]
                kept = value.clamp(old - clip, old + clip)
                total = total + 0.5 * max((value - target) ** 2, (kept - target) ** 2) / count
    return total


@pytest.mark.invariant
def test_loss_and_gradient_equal_the_plain_ones(tiny_model):
    config = config_of(cliprange_value=0.4)
    critic = turn_head(make_critic(tiny_model, config=config))
    batch = make_batch(critic, config)
    theirs = AutoModel.from_pretrained(tiny_model, dtype=torch.float64, attn_implementation="eager").eval()
    head = torch.nn.Linear(128, 1, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(critic.model.weight)
        head.bias.copy_(critic.model.bias)
    with stay_double():
        loss, clipped = critic.backward(batch)
        want = plain_loss(theirs, head, batch, 0.4)
        want.backward()
    assert loss == pytest.approx(want.item(), rel=1e-10)
    gradient = torch.cat([p.grad.flatten() for p in (*theirs.parameters(), *head.parameters())])
    distance = torch.linalg.vector_norm(critic.optimizer.gradient - gradient)
    assert distance <= 1e-10 * torch.linalg.vector_norm(gradient)
    assert 5 < clipped < int(batch.mask_NT.sum()) - 5


def test_the_first_pass_of_an_update_sees_the_old_values(tiny_model):
    """Same packing, so the same bits: nothing is clipped, and the loss is that of the old values."""
    config = config_of()
    critic = turn_head(make_critic(tiny_model, dtype="float32"))
    batch = make_batch(critic, config)
    batch = dataclasses.replace(batch, values_NT=critic.values(batch, [torch.arange(len(batch.responses))]))
    loss, clipped = critic.backward(batch)
    errors = (batch.values_NT - batch.returns_NT.float())[batch.mask_NT]
    assert clipped == 0
    assert loss == pytest.approx(float(0.5 * errors.square().mean()), rel=1e-6)


def test_tokens_without_loss_have_value_zero(tiny_model):
    critic = turn_head(make_critic(tiny_model))
    experience = make_rollouts().scored(rewards_N=torch.zeros(16), valid_N=torch.ones(16, dtype=torch.bool))
    values = critic.values(experience, EVERYONE)
    assert not values[~experience.mask_NT].any()
    assert values[experience.mask_NT].all()
    some = critic.values(experience, [torch.tensor([3, 1])])
    assert some[[0, 2]].count_nonzero() == 0
    torch.testing.assert_close(some[[1, 3]], values[[1, 3]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_it_learns_a_constant_return(tiny_model, shared):
    """With its own trunk, and by the head alone."""
    config = config_of(cliprange_value=10.0, optim={"lr": 0.02, "weight_decay": 0.0, "clip_grad": 100.0})
    critic = make_critic(tiny_model, shared=shared, dtype="float32", config=config)
    before = [parameter.detach().clone() for parameter in critic.model.trunk.module.parameters()]
    rate, updates = (0.02, 80) if shared else (2e-3, 40)
    batch = make_batch(critic, config, returns=torch.full(make_rollouts().mask_NT.shape, 0.7, dtype=torch.float64))
    losses = []
    for _ in range(updates):
        tally = Tally()
        critic.update(batch, rate, tally)
        losses.append(tally.means(Solo())["critic/loss"])
    assert losses[0] == pytest.approx(0.5 * 0.7**2, rel=1e-5)  # a new critic says 0
    assert losses[-1] < 1e-3
    values = critic.values(batch, [torch.arange(len(batch.responses))])
    assert (values - 0.7)[batch.mask_NT].abs().max() < 0.1
    same = [torch.equal(new, old) for new, old in zip(critic.model.trunk.module.parameters(), before, strict=True)]
    assert all(same) if shared else not any(same)


def test_what_it_reports(tiny_model):
    config = config_of()
    critic = turn_head(make_critic(tiny_model, config=config))
    batch = make_batch(critic, config)
    values = critic.values(batch, [torch.arange(len(batch.responses))])
    tally = Tally()
    critic.update(batch, 1e-4, tally)
    got = tally.means(Solo())
    norm = torch.linalg.vector_norm(critic.optimizer.gradient).item()
    mask, returns = batch.mask_NT, batch.returns_NT
    left = (returns - batch.values_NT)[mask].var() / (returns[mask].var() + 1e-5)
    assert got["critic/explained_variance"] == pytest.approx(1 - left.item(), rel=1e-6)
    assert got["critic/grad_norm"] > 1.0
    assert norm == pytest.approx(1.0, rel=1e-5)  # clipped
    loss, clipped = value_loss(values, batch.values_NT, returns, clip=0.5)
    assert got["critic/loss"] == pytest.approx(loss[mask].mean().item(), rel=1e-10)
    assert got["critic/clip_fraction"] == clipped[mask].double().mean().item()
    assert (got["critic/skipped_steps"], got["critic/learning_rate"]) == (0.0, 1e-4)


def test_an_update_that_is_not_finite_is_skipped_and_counted(tiny_model):
    config = config_of()
    critic = turn_head(make_critic(tiny_model, config=config))
    batch = make_batch(critic, config)
    broken = dataclasses.replace(batch, returns_NT=torch.full_like(batch.returns_NT, math.inf))
    before = {name: value.detach().clone() for name, value in critic.model.tensors().items()}
    tally = Tally()
    critic.update(broken, 1e-3, tally)
    assert tally.means(Solo())["critic/skipped_steps"] == 1.0
    assert "critic/grad_norm" not in tally.means(Solo())
    assert all(torch.equal(value, before[name]) for name, value in critic.model.tensors().items())
    with pytest.raises(NumericsError, match="2 updates of the critic had a non-finite gradient") as caught:
        critic.update(broken, 1e-3, Tally())
    assert "critic.optim.lr" in caught.value.remedy


def test_an_algorithm_without_returns_is_refused(tiny_model):
    config = config_of()
    critic = make_critic(tiny_model, config=config)
    batch = dataclasses.replace(make_batch(critic, config), returns_NT=None)
    with pytest.raises(ConfigError, match="the algorithm gives no returns"):
        critic.update(batch, 1e-3, Tally())


def test_the_critic_has_token_weights_of_its_own(tiny_model):
    config = config_of(loss_agg_mode="seq-mean-token-sum")
    batch = make_batch(make_critic(tiny_model, config=config), config)
    sequences = int(batch.mask_NT.any(-1).sum())
    assert torch.equal(batch.weights_NT, batch.mask_NT / batch.mask_NT.sum().double())
    assert torch.equal(batch.value_weights_NT, batch.mask_NT.double() / sequences)


def test_phases_are_opened_under_their_names(tiny_model):
    opened = []

    class Phase:
        def __init__(self, name):
            opened.append(name)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    config = config_of()
    critic = make_critic(tiny_model, shared=True, config=config, phase=Phase)
    critic.update(make_batch(critic, config), 1e-3, Tally())
    assert opened == ["values", "update_critic"]
