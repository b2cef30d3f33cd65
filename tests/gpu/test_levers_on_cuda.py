"""Whole GRPO steps on a CUDA device with every memory lever: the same weights, bit by bit. Run: make gpu."""

import pytest
import torch

from ullage.bench.fit import Case, Training
from ullage.model.target import find_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KEPT = {"memory.recompute": "none", "actor_rollout_ref.actor.use_kl_loss": True}


def trained(settings, micro_batch=96, steps=5):
    """Weights after five steps, and all that was sampled."""
    case = Case(
        shape="tiny",
        cap_gib=None,
        settings=KEPT | settings,
        prompts=4,
        samples=4,
        prompt_tokens=24,
        response_tokens=12,
        micro_batch=micro_batch,
        slots=16,
    )
    torch.manual_seed(0)
    training = Training(case, find_target("auto", 0))
    training.rate = 1e-3
    samples = [sample.token_ids for step in range(1, steps + 1) for sample in training.step(step)]
    return [parameter.detach().float().cpu() for parameter in training.actor.model.module.parameters()], samples


@pytest.fixture(scope="module")
def exact():
    """What a GPU would sum in any order it sums in one."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def want(exact):
    return trained({})


def test_a_run_repeats_itself_and_learns(want):
    weights, samples = trained({})
    assert samples == want[1]
    assert all(torch.equal(a, b) for a, b in zip(weights, want[0], strict=True))
    before, _ = trained({}, steps=0)
    assert not any(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"memory.recompute": "full"},
        {"memory.recompute": 0.5},
        {"memory.recompute": "matmuls"},
        {"memory.activation_offload": "sync"},
        {"memory.activation_offload": "async"},
        {"memory.activation_offload": "async", "memory.recompute": "full"},
        {"memory.activation_offload": "sync", "memory.recompute": "full"},
        {"memory.optimizer_state": "streamed"},
        {"memory.offload_roles": True},
        {"memory.offload_roles": True, "memory.optimizer_state": "streamed", "memory.activation_offload": "async"},
    ],
    ids=str,
)
def test_levers_change_no_bit(want, settings):
    weights, samples = trained(settings)
    assert samples == want[1]
    assert [torch.equal(a, b) for a, b in zip(weights, want[0], strict=True)] == [True] * len(weights)


@pytest.mark.parametrize("settings", [{"memory.optimizer_state": "host"}, {"memory.gradients": "host"}], ids=str)
def test_what_the_host_computes_differs_by_rounding(want, settings):
    """Another order of sums may change a token, and from then on everything: one step."""
    weights, samples = trained(settings, steps=1)
    base, drawn = trained({}, steps=1)
    assert samples == drawn
    for got, wanted in zip(weights, base, strict=True):
        assert (got - wanted).abs().max() <= 2**-8 * wanted.abs().max()
