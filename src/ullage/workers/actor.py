"""The actor: log-probs of its samples, and the update of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ullage.algorithms import Algorithm
from ullage.base.communicator import Communicator
from ullage.base.errors import NumericsError
from ullage.base.seeds import derive
from ullage.batch.pack import Limits
from ullage.batch.stages import Experience, Rollouts, TrainBatch
from ullage.config.tree import Actor as ActorConfig
from ullage.engine.optimizer import Levers, Optimizer
from ullage.engine.replay import Replayer, Replays
from ullage.maths import kl
from ullage.maths.correction import sequence_weights
from ullage.model.language_model import LanguageModel
from ullage.model.target import put
from ullage.telemetry.tally import Tally
from ullage.workers.passes import Phase, everything, extent, micro_batches, stage_logprobs


@dataclass(frozen=True, slots=True)
class Terms:
    """A loss and what to report of it: sums over tokens.

    They stay on the device until all micro-batches are on their way: who reads one waits for all that was launched.
    """

    loss: Tensor
    report: dict[str, tuple[Tensor, int]]
    """Sums, and the tokens that they are over: a loss may have nothing to say of some."""
    tokens: int

    def plus(self, other: Terms) -> Terms:
        report = dict(self.report)
        for name, (value, tokens) in other.report.items():
            report[name] = (report[name][0] + value, report[name][1] + tokens) if name in report else (value, tokens)
        return Terms(self.loss + other.loss, report, self.tokens + other.tokens)


class Actor:
    """The policy being trained: one language model, one optimizer."""

    def __init__(
        self,
        model: LanguageModel,
        config: ActorConfig,
        limits: Limits,
        ranks: Communicator,
        *,
        temperature: float,
        seed: int = 0,
        levers: Levers | None = None,
        phase: Phase = nullcontext,
        replays: Replays | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self._replayer = Replayer(limits, replays, advice=_advice)
        self.ranks = ranks
        self.temperature = temperature
        self.seed = seed
        self.phase = phase
        self.optimizer = Optimizer(model.named_parameters(), config.optim, levers, seed=derive(seed, "rounding"))
        self.nonfinite_steps = 0
        """Updates skipped so far because the gradient was not finite."""

    @property
    def limits(self) -> Limits:
        """Of one pass: the same for log-probs and update."""
        return self._replayer.limits

    def limits_for(self, stage: Rollouts) -> Limits:
        """The same, in any case wide enough for every sequence that the config allows."""
        return self._replayer.fit(extent(stage, everything(stage), self.limits))

    def logprobs(self, experience: Experience, mini_batches: list[Tensor]) -> Tensor:
        """[N, T] log-probs before the update, packed as the update will be, so that its first ratio is exactly 1."""
        with self.phase("logprob"):
            return self._logprobs("logprob", experience, mini_batches)

    def update(self, mini_batch: TrainBatch, algorithm: Algorithm, learning_rate: float, tally: Tally) -> None:
        """One optimizer step on a mini-batch whose token weights already hold the denominators of all ranks."""
        mini_batch = self.selected(mini_batch, algorithm)
        size = extent(mini_batch, everything(mini_batch), self.limits)
        terms = self._replayer.run("update", size, lambda: self.backward(mini_batch, algorithm))
        norm = self.optimizer.step(learning_rate, self.ranks)
        if terms is not None:
            tally.add_tokens("update", terms.tokens)
            for name, (value, tokens) in terms.report.items():
                tally.add(name, float(value), tokens)
        tally.add("actor/loss", 0.0 if terms is None else float(terms.loss), 1 / self.ranks.size)
        tally.add("actor/skipped_steps", 0.0 if math.isfinite(norm) else 1.0)
        if math.isfinite(norm):
            tally.add("actor/grad_norm", norm)
        else:
            self._count_nonfinite(norm)

    def backward(self, mini_batch: TrainBatch, algorithm: Algorithm) -> Terms | None:
        """The gradient of the mini-batch, by micro-batch, in place of the one there was. None: nothing carries loss."""
        self.optimizer.zero_grad()
        done: Terms | None = None
        for loss, terms in self.losses(mini_batch, algorithm):
            loss.backward()
            done = done.plus(terms) if done else terms
        return done

    def losses(self, mini_batch: TrainBatch, algorithm: Algorithm) -> Iterator[tuple[Tensor, Terms]]:
        """The loss of each micro-batch, with its graph; they add up to the mini-batch's."""
        for packed, part in micro_batches(mini_batch, self.model, self.limits_for(mini_batch)):
            values, entropies = self.model.logprobs(packed, temperature=self.temperature, entropy=True)
            assert entropies is not None, "asked for"
            width = part.mask_NT.shape[1]
            yield self._terms(packed.scatter(values, width), packed.scatter(entropies, width), part, algorithm)

    def selected(self, mini_batch: TrainBatch, algorithm: Algorithm) -> TrainBatch:
        """For a loss that singles out tokens by the statistics of all, marked in a pass over the whole mini-batch."""
        if not algorithm.selects:
            return mini_batch
        logprobs = self._logprobs("update", mini_batch, everything(mini_batch))
        seed = derive(self.seed, "selected tokens", self.optimizer.num_steps)
        return algorithm.prepare(mini_batch, logprobs, self.ranks, seed)

    def _logprobs(self, phase: str, experience: Experience, mini_batches: list[Tensor]) -> Tensor:
        def work() -> Tensor:
            return stage_logprobs(experience, mini_batches, self.model, self.limits, self.temperature)

        return self._replayer.run(phase, extent(experience, mini_batches, self.limits), work)

    def _terms(
        self, logprobs_NT: Tensor, entropy_NT: Tensor, part: TrainBatch, algorithm: Algorithm
    ) -> tuple[Tensor, Terms]:
        tokens = int(part.mask_NT.sum())
        part = part.moved(partial(put, device=logprobs_NT.device))
        mask = part.mask_NT
        old = logprobs_NT.detach() if part.old_logprobs_NT is None else part.old_logprobs_NT.to(logprobs_NT.dtype)
        token_loss = algorithm.policy_loss(logprobs_NT, old, part)
        loss_NT, report = token_loss.loss_NT, dict(token_loss.report_NT)
        if part.correction_NT is not None:
            weights_NT = part.correction_NT.to(loss_NT.dtype)
            loss_NT = loss_NT * (sequence_weights(weights_NT, mask) if token_loss.of_sequence else weights_NT)
        if part.ref_logprobs_NT is not None:
            kl_NT = kl.ESTIMATORS[self.config.kl_loss_type](logprobs_NT, part.ref_logprobs_NT.to(logprobs_NT.dtype))
            if self.config.use_kl_loss:  # the reference may be there for the reward alone
                loss_NT = loss_NT + self.config.kl_loss_coef * kl_NT
            report["actor/kl_ref"] = kl_NT
        if self.config.entropy_coeff:
            loss_NT = loss_NT - self.config.entropy_coeff * entropy_NT
        report["actor/entropy"] = entropy_NT
        if part.rollout_logprobs_NT is not None:
            report["rollout/logprob_gap_mean"] = (part.rollout_logprobs_NT.to(old.dtype) - old).abs()
        loss = (loss_NT * part.weights_NT.to(loss_NT.dtype)).sum()
        sums = {name: ((value.detach() * mask).sum(), tokens) for name, value in report.items()}
        return loss, Terms(loss.detach(), sums, tokens)

    def _count_nonfinite(self, norm: float) -> None:
        self.nonfinite_steps += 1
        if self.nonfinite_steps > self.config.max_nonfinite_steps:
            raise NumericsError(
                f"{self.nonfinite_steps} updates had a non-finite gradient (norm {norm})",
                "lower actor_rollout_ref.actor.optim.lr, or raise actor_rollout_ref.actor.max_nonfinite_steps",
            )


def _advice(limits: Limits) -> str:
    return f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={limits.max_tokens}"
