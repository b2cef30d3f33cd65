"""The critic: what return it expects before each response token, and the update of its weights."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial

from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.base.errors import ConfigError, NumericsError
from ullage.base.seeds import derive
from ullage.batch.pack import Limits
from ullage.batch.stages import Experience, TrainBatch
from ullage.config.tree import Critic as CriticConfig
from ullage.engine.optimizer import Levers, Optimizer
from ullage.engine.replay import Replayer, Replays
from ullage.maths.critic import explained_variance, value_loss
from ullage.model.target import put
from ullage.model.value_model import ValueModel
from ullage.telemetry.tally import Tally
from ullage.workers.passes import Phase, everything, extent, micro_batches, stage_numbers


class Critic:
    """One value model, one optimizer."""

    def __init__(
        self,
        model: ValueModel,
        config: CriticConfig,
        limits: Limits,
        ranks: Communicator,
        *,
        max_nonfinite_steps: int,
        seed: int = 0,
        levers: Levers | None = None,
        phase: Phase = nullcontext,
        replays: Replays | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self._replayer = Replayer(limits, replays, advice=_advice)
        self.ranks = ranks
        self.max_nonfinite_steps = max_nonfinite_steps
        self.phase = phase
        self.optimizer = Optimizer(
            model.named_parameters(), config.optim, levers, seed=derive(seed, "rounding of the critic")
        )
        self.nonfinite_steps = 0
        """Updates skipped so far because the gradient was not finite."""

    @property
    def limits(self) -> Limits:
        """Of one pass: the same for values and update."""
        return self._replayer.limits

    def values(self, experience: Experience, mini_batches: list[Tensor]) -> Tensor:
        """[N, T] value before each response token, packed as the update will be; 0 where a token carries no loss."""

        def work() -> Tensor:
            return stage_numbers(experience, mini_batches, self.model.trunk, self.limits, self.model.values)

        with self.phase("values"):
            return self._replayer.run("values", extent(experience, mini_batches, self.limits), work)

    def update(self, mini_batch: TrainBatch, learning_rate: float, tally: Tally) -> None:
        """One optimizer step on a mini-batch whose token weights already hold the denominators of all ranks."""
        with self.phase("update_critic"):
            old_values_NT, returns_NT = _targets(mini_batch)
            explained = explained_variance(old_values_NT, returns_NT, mini_batch.mask_NT, self.ranks)
            size = extent(mini_batch, everything(mini_batch), self.limits)
            loss, clipped = self._replayer.run("update_critic", size, lambda: self.backward(mini_batch))
            norm = self.optimizer.step(learning_rate, self.ranks)
        tally.add("critic/learning_rate", learning_rate)
        tally.add("critic/explained_variance", explained)
        tally.add("critic/loss", loss, 1 / self.ranks.size)
        tally.add("critic/clip_fraction", clipped, int(mini_batch.mask_NT.sum()))
        tally.add("critic/skipped_steps", 0.0 if math.isfinite(norm) else 1.0)
        if math.isfinite(norm):
            tally.add("critic/grad_norm", norm)
        else:
            self._count_nonfinite(norm)

    def backward(self, mini_batch: TrainBatch) -> tuple[float, float]:
        """The gradient of the mini-batch, in place of the one there was; its loss, and how many values were clipped."""
        self.optimizer.zero_grad()
        loss_sum: Tensor | float = 0.0  # on the device, so that the host need not wait for it
        num_clipped: Tensor | float = 0.0
        for packed, part in micro_batches(mini_batch, self.model.trunk, self.limits):
            values_NT = packed.scatter(self.model.values(packed), part.mask_NT.shape[1])
            part = part.moved(partial(put, device=values_NT.device))
            old_values_NT, returns_NT = (numbers.to(values_NT.dtype) for numbers in _targets(part))
            loss_NT, clipped_NT = value_loss(values_NT, old_values_NT, returns_NT, clip=self.config.cliprange_value)
            assert part.value_weights_NT is not None, "the schedule gives them"
            loss = (loss_NT * part.value_weights_NT.to(loss_NT.dtype)).sum()
            loss.backward()
            loss_sum = loss_sum + loss.detach()
            num_clipped = num_clipped + (clipped_NT & part.mask_NT).sum()
        return float(loss_sum), float(num_clipped)

    def _count_nonfinite(self, norm: float) -> None:
        self.nonfinite_steps += 1
        if self.nonfinite_steps > self.max_nonfinite_steps:
            raise NumericsError(
                f"{self.nonfinite_steps} updates of the critic had a non-finite gradient (norm {norm})",
                "lower critic.optim.lr, or raise actor_rollout_ref.actor.max_nonfinite_steps",
            )


def _targets(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Values before the update, and the returns they are to predict."""
    assert batch.values_NT is not None, "a run with a critic evaluates it"
    if batch.returns_NT is None:
        raise ConfigError(
            "critic.enable = true: the algorithm gives no returns, which a critic learns from",
            "leave critic.enable out, or choose an algorithm with a critic, such as ppo",
        )
    return batch.values_NT, batch.returns_NT


def _advice(limits: Limits) -> str:
    return f"critic.ppo_max_token_len_per_gpu={limits.max_tokens}"
