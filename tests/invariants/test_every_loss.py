"""Loss and gradient of every algorithm do not depend on micro-batches, packing or order; nor does what it selects."""

import pytest
import torch

from experience_samples import load, make_config, make_experience, stay_double
from ullage.algorithms._compose import compose
from ullage.base import extensions
from ullage.base.communicator import Solo
from ullage.batch.pack import Limits
from ullage.trainer.schedule import Schedule
from ullage.workers.actor import Actor

pytestmark = pytest.mark.invariant

WITH_LOSS = [n for n in extensions.known("algorithms") if hasattr(extensions.find("algorithms", n), "Loss")]
FREE = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ONLY = {"sapo": ("seq-mean-token-mean",), "gmpo": ("seq-mean-token-mean",)}
WHOLE = Limits(max_tokens=4096)
DIVISIONS = (
    Limits(max_tokens=4096, max_sequences=1),
    Limits(max_tokens=4096, max_sequences=3, share_prefix=False),
    Limits(max_tokens=60),
)
SELECTION = {"clip_cov_ratio": 0.2, "clip_cov_lb": -0.5, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model)


@pytest.fixture(scope="module")
def experience(model):
    with stay_double():
        made = make_experience(model)
    values = torch.rand(made.mask_NT.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return made.evaluated(old_logprobs=made.old_logprobs_NT, ref_logprobs=None, values=values)


def configured(name, **actor):
    # The ratio of a sequence is a mean, so GSPO's is nearer to 1 than a token's; its own clip would stop all of them.
    low, high = (0.02, 0.025) if name == "gspo" else (0.2, 0.25)
    return make_config(name, clip_ratio_low=low, clip_ratio_high=high, policy_loss=SELECTION, **actor)


def mini_batch_of(experience, config):
    algorithm = compose(config)
    batch = algorithm.assign_credit(experience, Solo())
    (mini_batch,) = Schedule(config, algorithm.aggregation, Solo()).mini_batches(batch, step=0)
    return algorithm, mini_batch


def updated(model, experience, config, limits, order=None):
    """Loss, gradient, and the tokens selected, by sample."""
    algorithm, batch = mini_batch_of(experience, config)
    batch = batch if order is None else batch.select(order)
    actor = Actor(model, config.actor_rollout_ref.actor, limits, Solo(), temperature=1.0, seed=3)
    with stay_double():
        if algorithm.selects:
            batch = actor.selected(batch, algorithm)
        terms = actor.backward(batch, algorithm)
    selected = {}
    if batch.selected_NT is not None:
        selected = {
            int(n): row.nonzero()[:, 0].tolist() for n, row in zip(batch.sample_N, batch.selected_NT, strict=True)
        }
    passes = sum(1 for _ in actor.losses(batch, algorithm))
    return float(terms.loss), actor.optimizer.gradient.clone(), selected, terms, passes


def assert_same(got, want):
    assert abs(got[0] - want[0]) <= 1e-10 * max(abs(want[0]), 1e-3)
    assert torch.linalg.vector_norm(got[1] - want[1]) <= 1e-10 * torch.linalg.vector_norm(want[1])
    assert got[2] == want[2]


@pytest.mark.parametrize("name", WITH_LOSS)
def test_division_packing_and_order(model, experience, name):
    config = configured(name)
    want = updated(model, experience, config, WHOLE)
    assert want[4] == 1
    assert torch.linalg.vector_norm(want[1]) > 1e-3
    if "actor/clip_fraction" in want[3].report:
        assert want[3].report["actor/clip_fraction"][0] > 1, "the batch must exercise the clip"
    if name in ("clip_cov", "kl_cov"):
        assert sum(map(len, want[2].values())) > 5, "the batch must exercise the selection"
    for limits in DIVISIONS:
        got = updated(model, experience, config, limits)
        assert got[4] > 2
        assert_same(got, want)
    order = torch.randperm(
        len(mini_batch_of(experience, config)[1].responses), generator=torch.Generator().manual_seed(0)
    )
    for limits in (WHOLE, DIVISIONS[2]):
        assert_same(updated(model, experience, config, limits, order), want)


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in WITH_LOSS for mode in ONLY.get(name, FREE)])
def test_every_aggregation(model, experience, name, mode):
    config = configured(name, loss_agg_mode=mode)
    assert_same(
        updated(model, experience, config, DIVISIONS[1]),
        updated(model, experience, config, WHOLE),
    )


@pytest.mark.parametrize("name", WITH_LOSS)
def test_the_loss_is_the_token_losses_aggregated(model, experience, name):
    """By hand, over the whole mini-batch: sum of each token's loss times its weight."""
    config = configured(name)
    algorithm, batch = mini_batch_of(experience, config)
    actor = Actor(model, config.actor_rollout_ref.actor, WHOLE, Solo(), temperature=1.0, seed=3)
    with stay_double():
        if algorithm.selects:
            batch = actor.selected(batch, algorithm)
        logprobs = actor.logprobs(batch, [torch.arange(len(batch.responses))])
        loss = float(actor.backward(batch, algorithm).loss)
    mask = batch.mask_NT.double()
    loss_NT = algorithm.policy_loss(logprobs, batch.old_logprobs_NT, batch).loss_NT * mask
    # The denominators hold every sample with a token, also those without signal.
    tokens_N = experience.mask_NT.sum(-1)
    sequences = int((tokens_N > 0).sum())
    per_token = loss_NT.sum() / tokens_N.sum()
    per_sequence = (loss_NT.sum(-1) / (mask.sum(-1) + 1e-8)).sum() / sequences
    want = {"token-mean": per_token, "seq-mean-token-mean": per_sequence}[algorithm.aggregation]
    assert loss == pytest.approx(want.item(), rel=1e-10, abs=1e-13)
