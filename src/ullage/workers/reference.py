"""The reference: the policy as it was at the start, frozen, for the KL term."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor

from ullage.batch.pack import Limits
from ullage.batch.stages import Experience, Rollouts
from ullage.engine.replay import Replayer, Replays
from ullage.model.language_model import LanguageModel
from ullage.workers.passes import Phase, everything, extent, stage_logprobs


class Reference:
    """Weights that never change: a second set, or the actor's own without its adapter."""

    def __init__(
        self,
        model: LanguageModel,
        limits: Limits,
        *,
        temperature: float,
        phase: Phase = nullcontext,
        replays: Replays | None = None,
    ) -> None:
        self.model = model
        self._replayer = Replayer(limits, replays, advice=_advice)
        self.temperature = temperature
        self.phase = phase
        if model.adapters is None:  # a module with adapters is frozen, and they are the actor's to train
            model.module.requires_grad_(False)

    @property
    def limits(self) -> Limits:
        """Of one pass."""
        return self._replayer.limits

    def limits_for(self, stage: Rollouts) -> Limits:
        """The same, in any case wide enough for every sequence that the config allows."""
        return self._replayer.fit(extent(stage, everything(stage), self.limits))

    def logprobs(self, experience: Experience, mini_batches: list[Tensor]) -> Tensor:
        """[N, T] log-probs, packed as the actor's."""

        def work() -> Tensor:
            return stage_logprobs(experience, mini_batches, self.model, self.limits, self.temperature)

        with self.phase("reference"):
            return self._replayer.run("reference", extent(experience, mini_batches, self.limits), work)


def _advice(limits: Limits) -> str:
    return f"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={limits.max_tokens}"
