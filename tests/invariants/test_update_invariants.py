"""Loss and gradient of an update do not depend on how its samples are divided, ordered, packed or recomputed."""

from contextlib import nullcontext

import pytest
import torch

from experience_samples import load, make_config, make_experience, make_train_batch, stay_double
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.batch.pack import Limits
from ullage.engine.recompute import recompute_layers
from ullage.model import head
from ullage.telemetry.tally import Tally
from ullage.workers.actor import Actor

pytestmark = pytest.mark.invariant

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
WHOLE = Limits(max_tokens=4096)
DIVISIONS = {
    "one sequence a time": Limits(max_tokens=4096, max_sequences=1),
    "two sequences": Limits(max_tokens=4096, max_sequences=2),
    "eight sequences": Limits(max_tokens=4096, max_sequences=8),
    "eight sequences, nothing shared": Limits(max_tokens=4096, max_sequences=8, share_prefix=False),
    "tightest token budget": Limits(max_tokens=34),
    "token budget": Limits(max_tokens=60),
    "token budget, nothing shared": Limits(max_tokens=60, share_prefix=False),
    "all in one, nothing shared": Limits(max_tokens=4096, share_prefix=False),
}
TEMPERATURE = 0.7


def config_of(mode="token-mean"):
    return make_config(loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.05, entropy_coeff=0.01)


@pytest.fixture(scope="module")
def models(tiny_model):
    return {dtype: load(tiny_model, dtype) for dtype in ("float64", "float32")}


@pytest.fixture(scope="module")
def experience(models):
    return make_experience(models["float64"], temperature=TEMPERATURE)


def loss_and_gradient(model, batch, config, limits):
    actor = Actor(model, config.actor_rollout_ref.actor, limits, Solo(), temperature=TEMPERATURE)
    with stay_double() if model.dtype == torch.float64 else nullcontext():
        terms = actor.backward(batch, compose(config))
    passes = sum(1 for _ in actor.losses(batch, compose(config)))
    return float(terms.loss), actor.optimizer.gradient.clone(), terms, passes


def assert_same(got, want, tolerance):
    assert abs(got[0] - want[0]) <= tolerance * abs(want[0])
    assert torch.linalg.vector_norm(got[1] - want[1]) <= tolerance * torch.linalg.vector_norm(want[1])


@pytest.mark.parametrize("mode", MODES)
def test_division_into_micro_batches_in_float64(models, experience, mode):
    config = config_of(mode)
    batch = make_train_batch(experience, config)
    want = loss_and_gradient(models["float64"], batch, config, WHOLE)
    assert want[3] == 1
    assert want[2].report["actor/clip_fraction"][0] > 5, "the batch must exercise the clip"
    for limits in DIVISIONS.values():
        assert_same(loss_and_gradient(models["float64"], batch, config, limits), want, 1e-10)


@pytest.mark.parametrize("name", DIVISIONS)
def test_division_into_micro_batches_in_float32(models, experience, name):
    config = config_of()
    batch = make_train_batch(experience, config)
    want = loss_and_gradient(models["float32"], batch, config, WHOLE)
    got = loss_and_gradient(models["float32"], batch, config, DIVISIONS[name])
    assert_same(got, want, 1e-5)
    exact = loss_and_gradient(models["float64"], batch, config, WHOLE)
    assert torch.linalg.vector_norm(got[1].double() - exact[1]) <= 1e-5 * torch.linalg.vector_norm(exact[1])


def test_reported_sums_do_not_depend_on_the_division(models, experience):
    config = config_of()
    batch = make_train_batch(experience, config)

    def sums(limits):
        terms = loss_and_gradient(models["float64"], batch, config, limits)[2]
        return {name: float(value) for name, (value, _) in terms.report.items()} | {"tokens": terms.tokens}

    want = sums(WHOLE)
    assert want["tokens"] == int(batch.mask_NT.sum())
    for limits in DIVISIONS.values():
        assert sums(limits) == pytest.approx(want, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_order_of_samples(models, experience, dtype, tolerance, seed):
    config = config_of("seq-mean-token-mean")
    batch = make_train_batch(experience, config)
    order = torch.randperm(len(batch.responses), generator=torch.Generator().manual_seed(seed))
    want = loss_and_gradient(models[dtype], batch, config, WHOLE)
    for limits in (WHOLE, DIVISIONS["two sequences"], DIVISIONS["token budget"]):
        assert_same(loss_and_gradient(models[dtype], batch.select(order), config, limits), want, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("rows", [1, 3, 7, 64])
def test_chunk_size_of_the_head(models, experience, monkeypatch, dtype, tolerance, rows):
    config = config_of()
    batch = make_train_batch(experience, config)
    want = loss_and_gradient(models[dtype], batch, config, WHOLE)
    monkeypatch.setattr(head, "CHUNK_LOGITS", rows * models[dtype].head.weight.shape[0])
    assert_same(loss_and_gradient(models[dtype], batch, config, WHOLE), want, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_gradient_checkpointing(tiny_model, models, experience, dtype, tolerance):
    config = config_of()
    batch = make_train_batch(experience, config)
    want = loss_and_gradient(models[dtype], batch, config, WHOLE)
    recomputed = load(tiny_model, dtype)
    recompute_layers(recomputed.layers)
    for limits in (WHOLE, DIVISIONS["two sequences"], DIVISIONS["all in one, nothing shared"]):
        assert_same(loss_and_gradient(recomputed, batch, config, limits), want, tolerance)


@pytest.mark.parametrize("name", ["one sequence a time", "token budget, nothing shared"])
def test_weights_after_two_updates(tiny_model, experience, name):
    config = make_config(use_kl_loss=True, entropy_coeff=0.01, optim={"lr": 1e-3, "clip_grad": 0.05})
    batch = make_train_batch(experience, config)

    def weights_after(limits):
        model = load(tiny_model)
        actor = Actor(model, config.actor_rollout_ref.actor, limits, Solo(), temperature=TEMPERATURE)
        with stay_double():
            for _ in range(2):
                actor.update(batch, compose(config), 1e-3, Tally())
        return torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])

    before = torch.cat([parameter.detach().flatten() for parameter in load(tiny_model).module.parameters()])
    want = weights_after(WHOLE)
    moved = torch.linalg.vector_norm(want - before)
    assert moved > 0.1
    assert torch.linalg.vector_norm(weights_after(DIVISIONS[name]) - want) <= 1e-7 * moved
