"""Loss and gradient of a mini-batch do not depend on its division into micro-batches, for any loss."""

import pytest
import torch

from ullage.maths import correction, covariance, critic, losses
from ullage.maths.aggregate import Counts, count, token_weights

NOISE = torch.Generator().manual_seed(20)
MASK = torch.tensor(
    [[1, 1, 1, 1, 1], [1, 1, 0, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
).bool()
LOGPROBS, OLD, ADVANTAGES = torch.randn(3, 6, 5, dtype=torch.float64, generator=NOISE)
SAMPLES = torch.arange(6)
CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
DROPPED = covariance.clip_cov_select(
    LOGPROBS, OLD, ADVANTAGES, MASK, SAMPLES, **CLIPS, fraction=0.2, low=0.0, high=9.0, seed=1
)
PENALISED = covariance.kl_cov_select(LOGPROBS, ADVANTAGES, MASK, SAMPLES, fraction=0.2)
ROLLOUT_WEIGHTS = correction.importance_weights(OLD, OLD * 0.9, MASK, level="sequence", high=2.0)

LOSSES = {
    "ppo": lambda x, o, a, m, d, p, w: losses.clipped_surrogate(x, o, a, **CLIPS, dual_clip=3.0)[0],
    "ppo corrected": lambda x, o, a, m, d, p, w: losses.clipped_surrogate(x, o, a, **CLIPS, dual_clip=3.0)[0] * w,
    "gspo": lambda x, o, a, m, d, p, w: losses.gspo(x, o, a, m, **CLIPS)[0],
    "sapo": lambda x, o, a, m, d, p, w: losses.sapo(x, o, a, tau_positive=1.0, tau_negative=1.05),
    "gpg": lambda x, o, a, m, d, p, w: losses.gpg(x, a),
    "cispo": lambda x, o, a, m, d, p, w: losses.cispo(x, o, a, **CLIPS)[0],
    "geo_mean": lambda x, o, a, m, d, p, w: losses.geo_mean(x, o, a, m, **CLIPS)[0],
    "clip_cov": lambda x, o, a, m, d, p, w: covariance.clip_cov(x, o, a, d, **CLIPS)[0],
    "kl_cov": lambda x, o, a, m, d, p, w: covariance.kl_cov(x, o, a, p, coefficient=0.1),
    "value": lambda x, o, a, m, d, p, w: critic.value_loss(x, o, a, clip=0.5)[0],
}
SPLITS = {"rows": [[0], [1], [2], [3], [4], [5]], "pairs": [[0, 3], [4, 1], [5, 2]], "uneven": [[2, 3, 4, 5, 1], [0]]}


def loss_and_gradient(name, rows, mode):
    """Of some rows, padded to the longest of them, under the weights of the whole mini-batch."""
    index = torch.tensor(rows)
    used = MASK[index].any(0).nonzero()
    width = int(used.max()) + 1 if len(used) else 0
    logprobs = LOGPROBS.clone().requires_grad_()
    weights = token_weights(MASK, mode, Counts(*count(MASK)), scale=7.0, dtype=torch.float64)
    part = [x[index][:, :width] for x in (logprobs, OLD, ADVANTAGES, MASK, DROPPED, PENALISED, ROLLOUT_WEIGHTS)]
    loss = (LOSSES[name](*part) * weights[index][:, :width]).sum()
    (gradient,) = torch.autograd.grad(loss, [logprobs])
    return loss.detach(), gradient


def test_both_choices_have_tokens():
    assert int(DROPPED.sum()) == int(PENALISED.sum()) == int(0.2 * MASK.sum()) == 2


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_gives_the_whole(name, mode):
    loss, gradient = loss_and_gradient(name, range(6), mode)
    assert loss.abs() > 1e-3
    assert bool((gradient[~MASK] == 0).all())
    assert bool(gradient[MASK].any())
    for split in SPLITS.values():
        parts = [loss_and_gradient(name, rows, mode) for rows in split]
        torch.testing.assert_close(sum(part[0] for part in parts), loss, rtol=0, atol=1e-15 * 8)
        torch.testing.assert_close(sum(part[1] for part in parts), gradient, rtol=0, atol=1e-15 * 8)
