"""Value loss and gradient do not depend on how the critic's samples are divided, packed or recomputed."""

from contextlib import nullcontext

import pytest
import torch

from experience_samples import CPU, load, make_rollouts, stay_double
from ullage.base.communicator import Solo
from ullage.batch.pack import Limits
from ullage.config.tree import Config
from ullage.engine.recompute import recompute_layers
from ullage.model.value_model import load_value_model, share_trunk
from ullage.trainer.schedule import Schedule
from ullage.workers.critic import Critic

pytestmark = pytest.mark.invariant

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
WHOLE = Limits(max_tokens=4096)
DIVISIONS = (
    Limits(max_tokens=4096, max_sequences=1),
    Limits(max_tokens=4096, max_sequences=2),
    Limits(max_tokens=34),
    Limits(max_tokens=60),
    Limits(max_tokens=60, share_prefix=False),
    Limits(max_tokens=4096, share_prefix=False),
)


def config_of(mode):
    data = {"train_batch_size": 4, "max_response_length": 16}
    return Config.model_validate({"data": data, "critic": {"loss_agg_mode": mode, "cliprange_value": 0.4}})


def put_numbers_in(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.weight.copy_(torch.randn(model.weight.shape, generator=generator, dtype=torch.float64) / 8)
    return model


@pytest.fixture(scope="module")
def models(tiny_model):
    return {
        "own": put_numbers_in(load_value_model(str(tiny_model), CPU, dtype="float64")),
        "shared": put_numbers_in(share_trunk(load(tiny_model))),
        "float32": put_numbers_in(load_value_model(str(tiny_model), CPU, dtype="float32")),
    }


@pytest.fixture(scope="module")
def experience(models):
    """With values near the critic's own, so that some are clipped, and with one sample that has no reward."""
    valid = torch.ones(16, dtype=torch.bool)
    valid[11] = False
    scored = make_rollouts().scored(rewards_N=torch.zeros(16), valid_N=valid)
    critic = Critic(models["own"], config_of("token-mean").critic, WHOLE, Solo(), max_nonfinite_steps=0)
    values = critic.values(scored, [torch.arange(16)])
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return scored.evaluated(old_logprobs=None, ref_logprobs=None, values=values + 0.5 * noise)


def make_batch(experience, mode):
    shape = experience.mask_NT.shape
    returns = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    batch = experience.credited(advantages_NT=torch.zeros(shape, dtype=torch.float64), returns_NT=returns)
    (mini_batch,) = Schedule(config_of(mode), "token-mean", Solo()).mini_batches(batch, step=0)
    return mini_batch


def loss_and_gradient(model, batch, mode, limits):
    critic = Critic(model, config_of(mode).critic, limits, Solo(), max_nonfinite_steps=0)
    with stay_double() if model.trunk.dtype == torch.float64 else nullcontext():
        loss, clipped = critic.backward(batch)
    return loss, critic.optimizer.gradient.clone(), clipped


def assert_same(got, want, tolerance):
    assert abs(got[0] - want[0]) <= tolerance * abs(want[0])
    assert torch.linalg.vector_norm(got[1] - want[1]) <= tolerance * torch.linalg.vector_norm(want[1])
    assert got[2] == want[2]


@pytest.mark.parametrize("kind", ["own", "shared"])
@pytest.mark.parametrize("mode", MODES)
def test_division_into_micro_batches_in_float64(models, experience, kind, mode):
    batch = make_batch(experience, mode)
    want = loss_and_gradient(models[kind], batch, mode, WHOLE)
    assert want[2] > 5, "the batch must exercise the clip"
    assert torch.linalg.vector_norm(want[1]) > 0
    for limits in DIVISIONS:
        assert_same(loss_and_gradient(models[kind], batch, mode, limits), want, 1e-10)


def test_division_into_micro_batches_in_float32(models, experience):
    batch = make_batch(experience, "token-mean")
    want = loss_and_gradient(models["float32"], batch, "token-mean", WHOLE)
    for limits in DIVISIONS:
        assert_same(loss_and_gradient(models["float32"], batch, "token-mean", limits), want, 1e-5)


def test_order_of_samples(models, experience):
    batch = make_batch(experience, "seq-mean-token-mean")
    order = torch.randperm(len(batch.responses), generator=torch.Generator().manual_seed(0))
    want = loss_and_gradient(models["own"], batch, "seq-mean-token-mean", WHOLE)
    for limits in (WHOLE, DIVISIONS[1], DIVISIONS[4]):
        assert_same(loss_and_gradient(models["own"], batch.select(order), "seq-mean-token-mean", limits), want, 1e-10)


def test_gradient_checkpointing(tiny_model, models, experience):
    batch = make_batch(experience, "token-mean")
    want = loss_and_gradient(models["own"], batch, "token-mean", WHOLE)
    recomputed = put_numbers_in(load_value_model(str(tiny_model), CPU, dtype="float64"))
    recompute_layers(recomputed.trunk.layers)
    for limits in (WHOLE, DIVISIONS[1]):
        assert_same(loss_and_gradient(recomputed, batch, "token-mean", limits), want, 1e-10)


def test_values_do_not_depend_on_the_division(models, experience):
    def values(limits):
        critic = Critic(models["own"], config_of("token-mean").critic, limits, Solo(), max_nonfinite_steps=0)
        with stay_double():
            return critic.values(experience, [torch.arange(16)])

    want = values(WHOLE)
    for limits in DIVISIONS:
        torch.testing.assert_close(values(limits), want, rtol=1e-10, atol=1e-12)
