"""Weights after five updates are the same bits with activations offloaded, recomputed, or both."""

from itertools import pairwise

import pytest
import torch

from experience_samples import CPU, load, make_config, make_experience, make_rollouts, make_train_batch
from make_tiny_model import make_tiny_model
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.batch.pack import Limits
from ullage.engine.offload import (
    AsyncDoubleBufferGroupOffloadHandler,
    SynchronizedGroupOffloadHandler,
    offload_activations,
)
from ullage.engine.recompute import recompute_layers
from ullage.model.lora import Adapter, Pair, Settings, new_adapter
from ullage.model.value_model import add_value_head
from ullage.telemetry.tally import Tally
from ullage.workers.actor import Actor
from ullage.workers.passes import micro_batches

pytestmark = pytest.mark.invariant

LAYERS = 4
LIMITS = Limits(max_tokens=60)
KINDS = {"sync": SynchronizedGroupOffloadHandler, "async": AsyncDoubleBufferGroupOffloadHandler}
RECOMPUTE = {
    "none": {"share": 0.0},
    "full": {},
    "half": {"share": 0.5},
    "matmuls": {"keep": "matmuls"},
    "half, matmuls": {"share": 0.5, "keep": "matmuls"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", layers=LAYERS)


@pytest.fixture(scope="module")
def config():
    return make_config(use_kl_loss=True, entropy_coeff=0.01, optim={"lr": 1e-3, "clip_grad": 0.05})


@pytest.fixture(scope="module")
def batch(folder, config):
    return make_train_batch(make_experience(load(folder, "float32")), config)


@pytest.fixture(scope="module")
def want(folder, batch, config):
    model = load(folder, "float32")
    before = weights(model)
    after = five_updates(model, batch, config)
    assert (after != before).float().mean() > 0.9
    return after


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])


def five_updates(model, batch, config):
    """Of several micro-batches, none of them of the size of the one before."""
    actor = Actor(model, config.actor_rollout_ref.actor, LIMITS, Solo(), temperature=0.7)
    sizes = [packed.input_ids.numel() for packed, _ in micro_batches(batch, model, LIMITS)]
    assert len(sizes) > 2
    assert all(one != other for one, other in pairwise(sizes))
    for _ in range(5):
        actor.update(batch, compose(config), 1e-3, Tally())
    return weights(model)


@pytest.mark.parametrize("recompute", ["full", "matmuls"])
def test_recompute(folder, batch, config, want, recompute):
    model = load(folder, "float32")
    recompute_layers(model.layers, **RECOMPUTE[recompute])
    assert torch.equal(five_updates(model, batch, config), want)


@pytest.mark.parametrize(
    ("kind", "recompute", "offloaded", "groups"),
    [
        ("sync", "none", 3, 4),
        ("sync", "full", 1, 2),
        ("sync", "half, matmuls", 4, 4),
        *[("async", recompute, 3, 4) for recompute in RECOMPUTE],
        ("async", "none", 1, 2),
        ("async", "full", 4, 4),
    ],
)
def test_offload(folder, batch, config, want, kind, recompute, offloaded, groups):
    model = load(folder, "float32")
    handler = KINDS[kind](offloaded, groups, device=CPU.device, min_bytes=256, slab_bytes=1 << 16)
    offload_activations(model.layers, handler)
    recompute_layers(model.layers, **RECOMPUTE[recompute])
    held = []
    original = handler.start_forward
    handler.start_forward = lambda: (held.append(handler.host_bytes), original())
    assert torch.equal(five_updates(model, batch, config), want)
    assert handler.offloaded_bytes > 0
    micro_batches_a_step = len(held) // 5
    assert len(set(held[micro_batches_a_step:])) == 1, "after the first step, no host memory is added"


@pytest.mark.parametrize("kind", KINDS)
def test_full_recompute_keeps_the_inputs_of_the_layers_only(folder, batch, kind):
    model = load(folder, "float32")
    recompute_layers(model.layers)
    handler = KINDS[kind](3, 4, device=CPU.device, min_bytes=256)
    offload_activations(model.layers, handler)
    packed, _ = next(iter(micro_batches(batch, model, LIMITS)))
    values, _ = model.logprobs(packed, temperature=1.0)
    one = packed.input_ids.numel() * model.module.config.hidden_size * 4
    assert (handler.saved_bytes, handler.offloaded_bytes) == (4 * one, 3 * one)
    values.sum().backward()


def roles(folder):
    """An actor and a critic with an adapter each on one frozen module."""
    model = load(folder, "float32")
    for name, targets, seed in (("actor", ["all-linear"], 3), ("critic", ["q_proj"], 9)):
        made = new_adapter(model.module, Settings(rank=2, alpha=4.0), targets, seed)
        generator = torch.Generator().manual_seed(seed)
        layers = {n: Pair(p.down, torch.randn(p.up.shape, generator=generator) * 0.3) for n, p in made.layers.items()}
        model = model.adapted(name, Adapter(made.settings, layers))
        if name == "actor":
            actor = model
    critic = add_value_head(model)
    with torch.no_grad():
        critic.weight.fill_(0.1)
    return actor, critic


@pytest.mark.parametrize(("kind", "recompute"), [("sync", "none"), ("async", "full"), ("async", "matmuls")])
def test_roles_that_share_a_module(folder, kind, recompute):
    def gradients(handler):
        actor, critic = roles(folder)
        if handler is not None:
            for layers in (actor.layers, critic.trunk.layers):  # each role asks for itself
                recompute_layers(layers, **RECOMPUTE[recompute])
                offload_activations(layers, handler)
        for packed, _ in micro_batches(make_rollouts(), actor, LIMITS):
            actor.logprobs(packed, temperature=1.0)[0].sum().backward()
            critic.values(packed).square().sum().backward()
        return [parameter.grad for _, parameter in [*actor.named_parameters(), *critic.named_parameters()]]

    handler = KINDS[kind](3, 4, device=CPU.device, min_bytes=256, slab_bytes=1 << 16)
    plain, offloaded = gradients(None), gradients(handler)
    assert handler.offloaded_bytes > 0
    assert all(torch.equal(one, other) for one, other in zip(plain, offloaded, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in plain)
