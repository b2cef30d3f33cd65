"""One file per algorithm: its credit assignment and its loss. The training loop knows none of them by name.

To add one, copy grpo.py: an `Algorithm` class built from the config, with `needs`, `has_signal`, `assign_credit` and
`policy_loss`. New maths goes to ullage/maths with a hand-computed test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience, TrainBatch


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per response token, before masks and denominators, and quantities worth reporting as token means."""

    loss_NT: Tensor
    report_NT: dict[str, Tensor]


class Algorithm(Protocol):
    needs: ClassVar[frozenset[str]]
    """Roles beside the actor: any of `reference`, `critic`."""

    def has_signal(self, experience: Experience) -> Tensor:
        """[N] False where a sample surely has no influence on the update, so that no time is spent on it."""

    def assign_credit(self, experience: Experience, ranks: Communicator) -> TrainBatch:
        """Advantages for every response token."""

    def policy_loss(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        """The loss of each token under the current policy."""
