"""The reference: the policy as it was at the start, frozen, for the KL term."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from ullage.batch.pack import Limits
from ullage.batch.stages import Experience
from ullage.model.language_model import LanguageModel
from ullage.workers.passes import Phase, stage_logprobs


class Reference:
    """Weights that never change: a second set, or the actor's own without its adapter."""

    def __init__(self, model: LanguageModel, limits: Limits, *, temperature: float, phase: Phase = nullcontext) -> None:
        self.model = model
        self.limits = limits
        self.temperature = temperature
        self.phase = phase
        if model.adapters is None:  # a module with adapters is frozen, and they are the actor's to train
            model.module.requires_grad_(False)

    def logprobs(self, experience: Experience, mini_batches: list[Tensor]) -> Tensor:
        with self.phase("reference"):
            return stage_logprobs(experience, mini_batches, self.model, self.limits, self.temperature)
