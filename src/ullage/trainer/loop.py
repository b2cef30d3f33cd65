"""The training loop: the page that reads like the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ullage.algorithms import Algorithm
from ullage.base.communicator import Communicator
from ullage.base.garbage import settled_garbage
from ullage.batch.stages import Experience
from ullage.config.tree import Config
from ullage.engine.optimizer import learning_rate
from ullage.engine.replay import Replays
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.tally import Tally
from ullage.trainer.collect import Collector
from ullage.trainer.correct import Corrector
from ullage.trainer.demonstrate import DemonstrationCollector, LossEvaluator
from ullage.trainer.evaluate import Evaluator
from ullage.trainer.schedule import Schedule
from ullage.trainer.state import Keeper
from ullage.trainer.stop import Stop
from ullage.workers.actor import Actor
from ullage.workers.critic import Critic
from ullage.workers.reference import Reference

Record = Callable[[Mapping[str, float]], None]


class Trainer:
    """One run: every rank makes one of these and they do the same things in the same order."""

    def __init__(
        self,
        *,
        config: Config,
        total_steps: int,
        actor: Actor,
        critic: Critic | None,
        reference: Reference | None,
        algorithm: Algorithm,
        collector: Collector | DemonstrationCollector,
        corrector: Corrector,
        evaluator: Evaluator | LossEvaluator | None,
        schedule: Schedule,
        keeper: Keeper,
        recorder: Recorder,
        replays: Replays,
        ranks: Communicator,
        stop: Stop,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.actor = actor
        self.critic = critic
        self.reference = reference
        self.algorithm = algorithm
        self.collector = collector
        self.corrector = corrector
        self.evaluator = evaluator
        self.schedule = schedule
        self.keeper = keeper
        self.recorder = recorder
        self.replays = replays
        self.ranks = ranks
        self.stop = stop

    @settled_garbage()
    def train(self) -> None:
        """Run until the last step, saving and evaluating on the way; leaves the trained model in `final/`."""
        if self.keeper.step == 0 and self.keeper.evaluated is None and self.config.trainer.val_before_train:
            self.stop.check(self.ranks, self.keeper)  # asked while the model was loading
            self.evaluate(0)
        while self.keeper.step < self.total_steps:
            self.stop.check(self.ranks, self.keeper)
            step = self.keeper.step + 1
            with self.stop.discarding(self.keeper), self.recorder.step(step) as record:
                self.step(step, record)
                if self._due(step, self.config.trainer.test_freq):
                    self.evaluate(step)
                record(self.replays.of_step(self.ranks))
            if self._due(step, self.config.trainer.save_freq) or self._is_new_best(step):
                self.keeper.save()
        self.keeper.export()

    def step(self, step: int, record: Record) -> None:
        """One training step: collect, evaluate, assign credit, update."""
        tally = Tally()
        experience = self.collector.collect(step, tally)
        plan = self.schedule.plan(experience, step)
        experience = experience.evaluated(
            old_logprobs=self.old_logprobs(experience, plan),
            ref_logprobs=self.reference.logprobs(experience, plan) if self.reference else None,
            values=self.critic.values(experience, plan) if self.critic else None,
        )
        experience = self.corrector.apply(experience, tally)
        batch = self.algorithm.assign_credit(experience, self.ranks)
        rate = learning_rate(self.config.actor_rollout_ref.actor.optim, step - 1, self.total_steps)
        critic_rate = learning_rate(self.config.critic.optim, step - 1, self.total_steps)
        trains_actor = self.critic is None or step > self.config.trainer.critic_warmup
        with self.recorder.phase("update"), self.stop.deferred():
            for mini_batch in self.schedule.mini_batches(batch, step):
                if trains_actor:
                    self.actor.update(mini_batch, self.algorithm, rate, tally)
                if self.critic:
                    self.critic.update(mini_batch, critic_rate, tally)
        self.keeper.advance(step)
        self.recorder.count_tokens(tally.tokens(self.ranks))
        record(tally.means(self.ranks) | {"actor/learning_rate": rate})

    def old_logprobs(self, experience: Experience, plan: list[Tensor]) -> Tensor | None:
        """None where nobody looks at them."""
        if self.corrector.bypass:
            return experience.rollout_logprobs_NT
        needed = needs_old_logprobs(self.algorithm, self.schedule, self.corrector)
        return self.actor.logprobs(experience, plan) if needed else None

    def evaluate(self, step: int) -> None:
        """Score held-out prompts, where there are any; remember the best."""
        if self.evaluator is None:
            return
        with self.stop.deferred():
            result = self.evaluator.evaluate(step)
        self.recorder.evaluation(step, result.metrics)
        self.keeper.consider(step, result.score)

    def _is_new_best(self, step: int) -> bool:
        """A run that keeps checkpoints keeps its best one, whenever it was."""
        return self.config.trainer.save_freq > 0 and self.keeper.is_best(step)

    def _due(self, step: int, every: int) -> bool:
        return step == self.total_steps or (every > 0 and step % every == 0)


def needs_old_logprobs(algorithm: Algorithm, schedule: Schedule, corrector: Corrector) -> bool:
    """Whether a step computes them; a strictly on-policy update is its own old policy."""
    looked_at = schedule.off_policy or corrector.compares or "old_logprobs" in algorithm.needs
    return looked_at and not corrector.bypass
