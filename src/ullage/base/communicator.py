"""The one door to other ranks: counts, statistics, gradients, errors. Trivial in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from ullage.base.errors import UllageError


class Communicator(Protocol):
    """What every rank may say to every other. Each call is collective: all ranks make it, in the same order."""

    rank: int
    size: int

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks."""

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks."""

    def sum_tensor_(self, tensor: Tensor) -> None:
        """Add the tensors of all ranks, in place: gradients."""

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 -- any JSON value
        """The JSON value of every rank, in rank order, on every rank."""

    def raise_together(self, error: UllageError | None) -> None:
        """Raise on every rank if any rank has an error: the first one by rank, so that nobody waits for a dead peer."""


class Solo:
    """The communicator of a run with one rank."""

    rank = 0
    size = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def max(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def sum_tensor_(self, tensor: Tensor) -> None:
        del tensor

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401
        return [value]

    def raise_together(self, error: UllageError | None) -> None:
        if error is not None:
            raise error
