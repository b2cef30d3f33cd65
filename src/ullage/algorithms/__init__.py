"""One file per algorithm. The training loop knows none of them by name; the file's name is the name in the config.

An algorithm is credit (from rewards to advantages), a policy loss, and how losses are aggregated. A file may hold a
`Credit`, a `Loss`, or both, and names what it takes from other files: `CREDIT`, `LOSS`, `AGGREGATION`. So verl's
`adv_estimator`, `loss_mode` and `loss_agg_mode` can replace any part. A file of your own may instead hold one
`Algorithm` class with everything. New maths goes to ullage/maths with a hand-computed test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience, TrainBatch
from ullage.config.tree import Config


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per response token, before masks and denominators, and quantities worth reporting as token means."""

    loss_NT: Tensor
    report_NT: dict[str, Tensor]
    of_sequence: bool = False
    """Each token carries the loss of its whole sequence, so a correction for it is the sequence's too."""


class Assigned(NamedTuple):
    """What a credit assignment gives: advantages, and returns where a critic learns from them."""

    advantages_NT: Tensor
    returns_NT: Tensor | None = None


class Credit(Protocol):
    """How samples become advantages. Built from the whole config."""

    needs: ClassVar[frozenset[str]]
    """What it cannot do without, beside the actor: any of `critic`, `greedy_baseline`."""

    def has_signal(self, experience: Experience) -> Tensor:
        """[N] False where a sample surely has advantage 0, so that no time is spent on it."""

    def assign(self, experience: Experience, rewards_NT: Tensor, ranks: Communicator) -> Assigned:
        """Advantages from token rewards: the sample's reward on its last token, less a KL penalty where one is on."""


class PolicyLoss(Protocol):
    """The loss of each token. Built from the whole config."""

    def __call__(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        """Loss under the current policy; `batch.selected_NT` is what `select` chose, where the loss has one."""


class SelectingLoss(PolicyLoss, Protocol):
    """A loss that singles out tokens by statistics of the whole mini-batch, so never per micro-batch."""

    def select(self, logprobs_NT: Tensor, batch: TrainBatch, ranks: Communicator, seed: int) -> Tensor:
        """[N, T] the chosen tokens, given the mini-batch's log-probs before the update."""


class Algorithm(Protocol):
    """What the training loop talks to."""

    needs: frozenset[str]
    """Roles beside the actor: any of `reference`, `critic`, `greedy_baseline`, `old_logprobs`."""
    aggregation: str
    """How token losses become one number: a mode of `maths.aggregate`."""
    refills: bool
    """Whether groups without signal are replaced by new prompts."""

    @property
    def selects(self) -> bool:
        """Whether the loss singles out tokens by statistics of the whole mini-batch, in `prepare`."""

    def has_signal(self, experience: Experience) -> Tensor:
        """[N] False where a sample surely has no influence on the update, so that no time is spent on it."""

    def assign_credit(self, experience: Experience, ranks: Communicator) -> TrainBatch:
        """Advantages for every response token."""

    def prepare(self, batch: TrainBatch, logprobs_NT: Tensor, ranks: Communicator, seed: int) -> TrainBatch:
        """The mini-batch with its tokens singled out, given their log-probs before the update."""

    def policy_loss(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        """The loss of each token under the current policy."""

    def state(self) -> dict[str, float]:
        """What a checkpoint must remember."""

    def restore(self, state: dict[str, float]) -> None:
        """Continue from what `state` gave."""


class WholeAlgorithm(ABC):
    """Base of an algorithm written as one class: define `assign_credit` and `policy_loss`, and what else differs."""

    needs: frozenset[str] = frozenset()
    aggregation = "token-mean"
    refills = False
    selects = False

    def __init__(self, config: Config) -> None:
        self.config = config
        self.aggregation = config.actor_rollout_ref.actor.loss_agg_mode or self.aggregation
        refills = config.algorithm.filter_groups.enable
        self.refills = self.refills if refills is None else refills

    @abstractmethod
    def assign_credit(self, experience: Experience, ranks: Communicator) -> TrainBatch:
        """Advantages for every response token: `experience.credited(advantages_NT=...)`."""

    @abstractmethod
    def policy_loss(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        """The loss of each token under the current policy."""

    def has_signal(self, experience: Experience) -> Tensor:
        return experience.valid_N

    def prepare(self, batch: TrainBatch, logprobs_NT: Tensor, ranks: Communicator, seed: int) -> TrainBatch:
        """Called where `selects` is True; singles out nothing unless you define it."""
        del logprobs_NT, ranks, seed
        return batch

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: dict[str, float]) -> None:
        del state
