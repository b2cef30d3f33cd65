"""Packed passes over a stage's samples: which ones, in which micro-batches, under which limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ullage.batch.pack import Limits, pack
from ullage.batch.stages import Experience, Rollouts
from ullage.engine.replay import Extent
from ullage.model.language_model import LanguageModel
from ullage.model.packing import Packed, build
from ullage.model.trunk import Trunk

Stage = TypeVar("Stage", bound=Rollouts)
Phase = Callable[[str], AbstractContextManager[Any]]
"""Opens a named phase of the step: timing and memory are measured around what happens in it."""


def extent(stage: Rollouts, mini_batches: Iterable[Tensor], limits: Limits) -> Extent:
    """How much the passes over these mini-batches have to hold: the most of any of them."""
    lengths = [max(len(response) - 1, 0) for response in stage.responses]  # the last token is not fed
    prompts = [len(stage.prompts[group]) for group in stage.group_N.tolist()]
    longest = total = count = 0
    for members in mini_batches:
        carriers = members[stage.mask_NT[members].any(-1)].tolist()
        # A prompt is fed once for its group, or once for each of its samples.
        fed = {stage.group_N[i].item() if limits.share_prefix else ~i: prompts[i] for i in carriers}
        longest = max([longest, *(prompts[i] + lengths[i] for i in carriers)])
        total = max(total, sum(fed.values()) + sum(lengths[i] for i in carriers))
        count = max(count, len(carriers))
    return Extent(longest, total, count)


def everything(stage: Rollouts) -> list[Tensor]:
    """All samples of a stage as one mini-batch."""
    return [torch.arange(len(stage.responses))]


def micro_batches(stage: Stage, model: Trunk, limits: Limits) -> Iterator[tuple[Packed, Stage]]:
    """Micro-batches over every sample of the stage that carries loss."""
    carriers = stage.mask_NT.any(-1).nonzero()[:, 0].tolist()
    groups = stage.group_N.tolist()
    prompt_lengths = [len(prompt) for prompt in stage.prompts]
    response_lengths = [len(response) for response in stage.responses]
    for blocks in pack(prompt_lengths, groups, response_lengths, carriers, limits):
        packed = build(stage, blocks, model.target, model.dtype)
        yield packed, stage.select(packed.samples)


def stage_logprobs(
    experience: Experience, mini_batches: list[Tensor], model: LanguageModel, limits: Limits, temperature: float
) -> Tensor:
    """[N, T] log-probs of the samples with signal, packed just as the update will pack them."""
    return stage_numbers(
        experience, mini_batches, model, limits, lambda packed: model.logprobs(packed, temperature=temperature)[0]
    )


@torch.no_grad()
def stage_numbers(
    experience: Experience,
    mini_batches: list[Tensor],
    model: Trunk,
    limits: Limits,
    compute: Callable[[Packed], Tensor],
) -> Tensor:
    """[N, T] what `compute` gives for each target of the samples in these mini-batches; 0 elsewhere."""
    width = experience.mask_NT.shape[1]
    out = torch.zeros(experience.mask_NT.shape, dtype=torch.promote_types(model.dtype, torch.float32))
    for members in mini_batches:
        part = experience.select(members)
        for packed, _ in micro_batches(part, model, limits):
            out[members[packed.samples]] = packed.scatter(compute(packed), width).to(out)
    return out
