"""`BaseTrainer` and `BaseAlgorithm`: a run whose credit, loss or update a subclass replaces, in place.

Every mini-batch is held in one graph where a loss or an update is replaced, so that any loss is right, also one that
takes a mean; an algorithm in a file of its own (docs/custom_algorithm.md) is split into micro-batches and is not bound
to one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ullage.algorithms import Algorithm, TokenLoss
from ullage.algorithms._compose import Composed
from ullage.base.communicator import Communicator
from ullage.base.errors import ConfigError, UsageError
from ullage.batch.stages import Experience, TrainBatch
from ullage.compat.experience import ExperienceBatch
from ullage.compat.given import Given
from ullage.compat.policy import Policy, StepOptimizer, TrainedPolicy
from ullage.compat.reward import RewardModel
from ullage.compat.session import Session
from ullage.compat.trainer import Trainer
from ullage.compat.value import RunningCritic
from ullage.maths import advantages_token
from ullage.telemetry.tally import Tally
from ullage.trainer.collect import Collector
from ullage.workers.actor import Actor

PerResponse = Callable[[Tensor, Tensor], Any]
"""Token rewards and values of one response to its advantages: [T], [T] -> T numbers."""


class BaseTrainer(Trainer):
    """A run of the config's algorithm, less what a subclass defines itself:

    compute_advantages(rewards, values)   credit of one response, from the rewards and values of its tokens
    compute_loss(batch)                   the loss of a mini-batch; the update then is zero, backward, step
    update_policy(batch)                  the whole update of a mini-batch; may return metrics

    Everything else stays: sampling, rewards, the critic's update, evaluation, checkpoints, files.
    """

    actor: TrainedPolicy
    actor_optimizer: StepOptimizer
    critic: RunningCritic | None
    critic_optimizer: StepOptimizer | None
    reference_model: Policy | None

    def __init_subclass__(cls, **options: Any) -> None:  # noqa: ANN401
        super().__init_subclass__(**options)
        own = cls.__dict__.get("compute_advantages")
        if own is not None:
            cls.compute_advantages = _for_each_response(own)  # type: ignore[method-assign]

    def __init__(self, config: Given) -> None:
        super().__init__(config)
        self._batch: ExperienceBatch | None = None
        if self._num_ranks > 1:
            raise ConfigError(
                f"trainer.n_gpus_per_node = {self._num_ranks}: a trainer of your own runs on one rank",
                "write the algorithm as a file (docs/custom_algorithm.md), which runs on any number",
            )

    def setup_models(self) -> None:
        """Open the models now, rather than with the first call that needs them."""
        self._opened_session()

    @functools.cached_property
    def reward_model(self) -> RewardModel | None:
        """The reward model of the config, loaded when it is first used: scoring needs no help of yours."""
        return RewardModel(self._loaded.config) if self._loaded.config.reward_model.enable else None

    # --- what a subclass may define ---

    def update_policy(self, batch: ExperienceBatch) -> Mapping[str, float] | None:
        """One optimizer step on a mini-batch."""
        if not self._defines("compute_loss"):
            self._update_as_built_in(batch)
            return None
        self.actor_optimizer.zero_grad()
        loss = self.compute_loss(batch)
        loss.backward()
        self.actor_optimizer.step()
        return {"actor/loss": float(loss.detach())}

    def compute_loss(self, batch: ExperienceBatch) -> Tensor:
        """The algorithm's own loss of a mini-batch, KL and entropy terms included, as a scalar with its graph."""
        role, algorithm = self._role, self._algorithm
        stage = role.selected(_train_batch(batch), algorithm)
        losses = [loss for loss, _ in role.losses(stage, algorithm)]
        return torch.stack(losses).sum() if losses else torch.zeros((), requires_grad=True)

    def compute_advantages(
        self,
        rewards: ExperienceBatch | Tensor,
        values: Tensor | None = None,
        gamma: float | None = None,
        lambda_gae: float | None = None,
    ) -> Tensor:
        """Of a batch, the advantages it has: [N, T]. Of one response's token rewards and values, GAE: [T]."""
        if isinstance(rewards, ExperienceBatch):
            assert rewards.advantages is not None, "a mini-batch has its credit"
            return rewards.advantages
        settings = self._loaded.config.algorithm
        advantages, _ = advantages_token.gae(
            rewards[None],
            torch.zeros_like(rewards)[None] if values is None else values.to(rewards)[None],
            torch.ones_like(rewards, dtype=torch.bool)[None],
            gamma=settings.gamma if gamma is None else gamma,
            lam=settings.lam if lambda_gae is None else lambda_gae,
        )
        return advantages[0]

    # --- how it gets into the loop ---

    def _opened(self, session: Session) -> None:
        """Put the subclass's parts into the places of the loop's own."""
        loop = session.loop
        self._role, self._algorithm = loop.actor, loop.algorithm
        self.actor = TrainedPolicy(loop.actor)
        self.actor_optimizer = self.actor.optimizer
        self.critic = RunningCritic(loop.critic) if loop.critic else None
        self.critic_optimizer = self.critic.optimizer if self.critic else None
        self.reference_model = Policy(loop.reference) if loop.reference else None
        if any(map(self._defines, ("update_policy", "compute_loss", "compute_advantages"))):
            credit = self.compute_advantages if self._defines("compute_advantages") else None
            algorithm = OwnCredit(loop.algorithm, credit)
            loop.algorithm = algorithm
            if isinstance(loop.collector, Collector):  # it asks which samples have signal
                loop.collector.algorithm = algorithm
            loop.actor = cast(Actor, OwnUpdate(loop.actor, self._update))

    def _defines(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(BaseTrainer, name)

    def _update(self, mini_batch: TrainBatch, rate: float, tally: Tally) -> None:
        """What the loop calls for every mini-batch."""
        self._batch = ExperienceBatch(mini_batch, self._role.model.tokenizer)
        self._rate, self._tally = rate, tally
        self.actor_optimizer.learning_rate = rate
        metrics = self.update_policy(self._batch) or {}
        self._batch = None
        for name, value in metrics.items():
            tally.add(name, value)
        for norm in self.actor_optimizer.norms:
            tally.add("actor/grad_norm", norm)
        if self.actor_optimizer.norms:
            tally.add_tokens("update", int(mini_batch.mask_NT.sum()))
        self.actor_optimizer.norms.clear()

    def _update_as_built_in(self, batch: ExperienceBatch) -> None:
        if batch is not self._batch:
            raise UsageError(
                "update_policy was given another batch than the loop's", "pass on the one it was called with"
            )
        self._role.update(_train_batch(batch), self._algorithm, self._rate, self._tally)


class BaseAlgorithm(BaseTrainer):
    """The same under the other name: an algorithm of your own, with the run that trains by it."""


class OwnUpdate:
    """An actor whose update is user code."""

    def __init__(self, actor: Actor, update: Callable[[TrainBatch, float, Tally], None]) -> None:
        self._actor = actor
        self._update = update

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- all else is the actor's
        return getattr(self._actor, name)

    def update(self, mini_batch: TrainBatch, algorithm: Algorithm, learning_rate: float, tally: Tally) -> None:
        del algorithm
        self._update(mini_batch, learning_rate, tally)


class OwnCredit:
    """The config's algorithm, with user code where it assigns credit."""

    def __init__(self, inner: Algorithm, credit: Callable[..., Any] | None) -> None:
        self._inner = inner
        self._credit = credit
        self.needs = inner.needs | {"old_logprobs"}
        self.aggregation = inner.aggregation
        self.refills = inner.refills

    @property
    def selects(self) -> bool:
        return self._inner.selects

    def has_signal(self, experience: Experience) -> Tensor:
        """Nobody knows which samples a loss or a credit of one's own leaves out."""
        return experience.valid_N

    def assign_credit(self, experience: Experience, ranks: Communicator) -> TrainBatch:
        if self._credit is None:
            return self._inner.assign_credit(experience, ranks)
        rewards_NT = advantages_token.at_last_token(experience.rewards_N, experience.mask_NT)
        if isinstance(self._inner, Composed) and self._inner.penalty:
            rewards_NT = self._inner.penalty.apply(rewards_NT, experience, ranks)
        values_NT = experience.values_NT
        advantages_NT = for_each_response(self._credit, rewards_NT, values_NT, experience.mask_NT)
        returns_NT = None if values_NT is None else (advantages_NT + values_NT.to(advantages_NT)) * experience.mask_NT
        return experience.credited(advantages_NT=advantages_NT, returns_NT=returns_NT)

    def prepare(self, batch: TrainBatch, logprobs_NT: Tensor, ranks: Communicator, seed: int) -> TrainBatch:
        return self._inner.prepare(batch, logprobs_NT, ranks, seed)

    def policy_loss(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        return self._inner.policy_loss(logprobs_NT, old_logprobs_NT, batch)

    def state(self) -> dict[str, float]:
        return self._inner.state()

    def restore(self, state: dict[str, float]) -> None:
        self._inner.restore(state)


def for_each_response(compute: PerResponse, rewards_NT: Tensor, values_NT: Tensor | None, mask_NT: Tensor) -> Tensor:
    """[N, T] advantages from a function of one response's tokens; it sees those the policy sampled, and no padding."""
    out = torch.zeros_like(rewards_NT)
    values_NT = torch.zeros_like(rewards_NT) if values_NT is None else values_NT.to(rewards_NT)
    for row, mask in enumerate(mask_NT):
        places = mask.nonzero()[:, 0]
        if not len(places):
            continue
        given = torch.as_tensor(compute(rewards_NT[row, places], values_NT[row, places])).detach().to(out)
        if given.shape != places.shape:
            raise UsageError(
                f"compute_advantages gave {tuple(given.shape)} for a response of {len(places)} tokens",
                "return one number for each token",
            )
        out[row, places] = given
    return out


def _for_each_response(own: Callable[..., Any]) -> Callable[..., Any]:
    """A `compute_advantages` written for one response, which can also be called for a whole mini-batch."""

    @functools.wraps(own)
    def compute(self: BaseTrainer, rewards: Any, values: Any = None, *rest: Any, **named: Any) -> Any:  # noqa: ANN401
        batch = rewards if isinstance(rewards, ExperienceBatch) else self._batch
        if isinstance(rewards, ExperienceBatch):
            rewards, values = rewards.rewards, rewards.values if values is None else values
        elif values is None or getattr(values, "ndim", 1) == 1:
            return own(self, rewards, values, *rest, **named)
        if batch is None:
            raise UsageError("compute_advantages was given several responses outside an update", "give it one response")
        mask_NT = batch.response_mask
        rewards_NT = advantages_token.at_last_token(rewards, mask_NT) if rewards.ndim == 1 else rewards
        return for_each_response(lambda r, v: own(self, r, v, *rest, **named), rewards_NT, values, mask_NT)

    return compute


def _train_batch(batch: ExperienceBatch) -> TrainBatch:
    if not isinstance(batch.stage, TrainBatch):
        raise UsageError("the batch has no advantages", "set batch.advantages, or pass on a mini-batch of the loop's")
    return batch.stage
