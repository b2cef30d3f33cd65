"""Small batches of real shape for tests: prompts, ragged responses, masks with holes, rewards."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.nn import functional

from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.batch.pack import Limits
from ullage.batch.stages import Rollouts, pad_rows
from ullage.config.tree import Config
from ullage.model.load import load_model
from ullage.model.target import Target
from ullage.trainer.schedule import Schedule
from ullage.workers.passes import stage_logprobs

CPU = Target("cpu", 0, (0, 0), 8 << 30)
PROMPT_LENGTHS = (3, 21, 1, 8)
RESPONSE_LENGTHS = (5, 1, 12, 7, 14, 2, 9, 3, 1, 6, 11, 4, 8, 10, 3, 13)
TOOL_SPAN = (2, slice(4, 8))
"""A sample and the tokens in its middle that the policy was given."""
NO_LOSS = 6
"""A sample none of whose tokens carries loss."""


def load(folder, dtype="float64"):
    return load_model(str(folder), CPU, dtype=dtype)


def tokens(generator, count):
    """Ids of ordinary characters of the tiny vocabulary."""
    return tuple(torch.randint(4, 36, (count,), generator=generator).tolist())


def make_rollouts(seed=0, prompt_lengths=PROMPT_LENGTHS, response_lengths=RESPONSE_LENGTHS):
    """Samples spread evenly over the prompts, one with a tool span, one without loss."""
    generator = torch.Generator().manual_seed(seed)
    prompts = tuple(tokens(generator, length) for length in prompt_lengths)
    responses = tuple(tokens(generator, length) for length in response_lengths)
    width = max(response_lengths)
    mask = pad_rows([[1.0] * length for length in response_lengths], width=width, dtype=torch.bool)
    mask[TOOL_SPAN] = False
    mask[NO_LOSS] = False
    num = len(responses)
    return Rollouts(
        prompts=prompts,
        order_G=torch.arange(len(prompts)),
        group_N=torch.arange(num) * len(prompts) // num,
        sample_N=torch.arange(num),
        responses=responses,
        mask_NT=mask,
        rollout_logprobs_NT=torch.zeros(num, width, dtype=torch.float64),
        finish_reasons=("stop",) * num,
    )


def rollouts_of(prompts, samples):
    """An engine's samples as a stage."""
    width = max(len(sample.token_ids) for sample in samples)
    return Rollouts(
        prompts=tuple(prompts),
        order_G=torch.arange(len(prompts)),
        group_N=torch.tensor([sample.group for sample in samples]),
        sample_N=torch.arange(len(samples)),
        responses=tuple(sample.token_ids for sample in samples),
        mask_NT=pad_rows([[1.0] * len(sample.token_ids) for sample in samples], width=width, dtype=torch.bool),
        rollout_logprobs_NT=pad_rows([sample.logprobs for sample in samples], width=width, dtype=torch.float64),
        finish_reasons=tuple(sample.finish_reason for sample in samples),
    )


def make_config(algorithm="grpo", **actor):
    """A config with these actor settings, for the batches made here."""
    data = {"train_batch_size": len(PROMPT_LENGTHS), "max_response_length": 16}
    reward = {"functions": [{"name": "length"}]}
    return Config.model_validate(
        {"data": data, "actor_rollout_ref": {"actor": actor}, "algorithm": {"name": algorithm}, "reward": reward}
    )


def make_experience(model, *, temperature=1.0):
    """Scored and evaluated: old and reference log-probs are near the model's own, so that some ratios are clipped."""
    rollouts = make_rollouts()
    num = len(rollouts.responses)
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randint(0, 3, (num,), generator=generator).double() / 2
    valid = torch.ones(num, dtype=torch.bool)
    valid[11] = False
    experience = rollouts.scored(rewards_N=rewards, valid_N=valid)
    logprobs = stage_logprobs(experience, [torch.arange(num)], model, Limits(max_tokens=4096), temperature)
    old, ref = (
        logprobs + 0.3 * torch.randn(logprobs.shape, generator=generator, dtype=logprobs.dtype) for _ in range(2)
    )
    return experience.evaluated(old_logprobs=old, ref_logprobs=ref, values=None)


def make_train_batch(experience, config):
    """The one mini-batch of a step, with its token weights."""
    algorithm = compose(config)
    batch = algorithm.assign_credit(experience, Solo())
    (mini_batch,) = Schedule(config, algorithm.aggregation, Solo()).mini_batches(batch, step=0)
    return mini_batch


@contextmanager
def stay_double():
    """Keep float64 in float64.

    transformers computes norms and softmax in float32 whatever the dtype. A rounding there is theirs, and would hide
    a difference of ours that is smaller.
    """
    original = {torch.Tensor: ("to", torch.Tensor.to), functional: ("softmax", functional.softmax)}

    def wider(function):
        def call(tensor, *args, **kwargs):
            if tensor.dtype == torch.float64:
                args = [torch.float64 if value is torch.float32 else value for value in args]
                kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
            return function(tensor, *args, **kwargs)

        return call

    with ExitStack() as patches:
        for owner, (name, function) in original.items():
            patches.enter_context(mock.patch.object(owner, name, wider(function)))
        patches.enter_context(mock.patch.object(torch.Tensor, "float", lambda tensor: tensor.to(torch.float32)))
        yield
