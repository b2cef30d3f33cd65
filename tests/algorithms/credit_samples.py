"""One small step by hand: two prompts, five samples, a tool's token, an unscored sample."""

import torch

from ullage.batch.stages import Rollouts
from ullage.config.tree import Config

REWARDS = (1.0, 0.0, 0.5, 2.0, 2.5)
VALID = (True, True, True, True, True)


def make_config(name=None, *, actor=None, functions=1, **algorithm):
    """A config with this algorithm, its options as keywords."""
    return Config.model_validate(
        {
            "actor_rollout_ref": {"actor": actor or {}},
            "algorithm": {"name": name, **algorithm},
            "reward": {"functions": [{"name": "length", "weight": 1.0 + i} for i in range(functions)]},
        }
    )


def make_experience(rewards=REWARDS, valid=VALID, *, parts=None, baseline=None, old=None, ref=None, values=None):
    """Three samples of the first prompt (the first with a tool's token in its middle), two of the second."""
    rollouts = Rollouts(
        prompts=((5,), (6,)),
        order_G=torch.arange(2),
        group_N=torch.tensor([0, 0, 0, 1, 1]),
        sample_N=torch.arange(5),
        responses=((3, 9, 2), (4, 2), (7, 7, 2), (2,), (3, 2)),
        mask_NT=torch.tensor([[1, 0, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool),
        rollout_logprobs_NT=torch.zeros(5, 3),
        finish_reasons=("stop",) * 5,
    )
    experience = rollouts.scored(
        rewards_N=doubles(rewards),
        valid_N=torch.tensor(valid),
        reward_parts_NK=None if parts is None else doubles(parts),
    )
    if baseline is not None:
        experience = experience.compared(doubles(baseline))
    return experience.evaluated(old_logprobs=old, ref_logprobs=ref, values=values)


def doubles(values):
    return torch.tensor(values, dtype=torch.float64)


def numbers(seed):
    """[N, T] log-probs, values or whatever else a test needs."""
    return -torch.rand(5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
