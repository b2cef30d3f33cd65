"""The order in which training sees its prompts: one permutation per epoch, resumable at any batch."""

import random
from collections.abc import Mapping
from typing import Any, Protocol

from ullage.base.errors import DataError
from ullage.base.seeds import derive


class PromptSampler(Protocol):
    """What draws the prompts of a run: by permutation (here), by source (mixture.py), by success (curriculum.py).

    Everything depends on the seed and on what was learned, which is the same on every rank, so every rank draws the
    same batches.
    """

    @property
    def batches_per_epoch(self) -> int:
        """Batches that all rows fill once."""

    def next_batch(self) -> list[int]:
        """Indices of the rows of the next batch; no row twice."""

    def learn(self, rates: Mapping[int, float]) -> None:
        """Which share of the answers to each row was right."""

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; refused where that order cannot be reproduced."""


class Sampler:
    """Draws batches of row indices. The order depends on (seed, epoch) alone, so every rank can draw the whole batch.

    The rows that do not fill a last batch are left out of their epoch, as in verl; the next permutation mixes them in.
    """

    def __init__(
        self, num_rows: int, batch_size: int, *, seed: int, shuffle: bool, epoch: int = 0, cursor: int = 0
    ) -> None:
        if num_rows < batch_size:
            raise DataError(
                f"{num_rows} prompts do not fill one batch of data.train_batch_size={batch_size}",
                f"set data.train_batch_size={num_rows} or less, or add data" if num_rows else "add data",
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = epoch
        self.cursor = cursor
        """Rows of this epoch already drawn."""
        self._order = self._permutation()

    @property
    def batches_per_epoch(self) -> int:
        return self.num_rows // self.batch_size

    def next_batch(self) -> list[int]:
        return self.draw(self.batch_size)

    def draw(self, count: int) -> list[int]:
        """The next so many rows; begins the next epoch when this one has fewer left."""
        if self.cursor + count > self.num_rows:
            self._begin_epoch()
        start, self.cursor = self.cursor, self.cursor + count
        return self._order[start : self.cursor]

    def learn(self, rates: Mapping[int, float]) -> None:
        """Nothing: the order is fixed."""

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_rows": self.num_rows,
        }

    def restore(self, state: dict[str, Any]) -> None:
        for name in ("num_rows", "seed", "shuffle"):
            refuse_change(name, state[name], getattr(self, name))
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self._order = self._permutation()

    def _begin_epoch(self) -> None:
        self.epoch += 1
        self.cursor = 0
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        order = list(range(self.num_rows))
        if self.shuffle:
            random.Random(derive(self.seed, "prompt order", self.epoch)).shuffle(order)
        return order


class Walk(Sampler):
    """Every row once per epoch, however many are drawn at a time: a draw may reach into the next epoch.

    What such a draw already has comes last in that epoch, so that no draw has a row twice.
    """

    def __init__(self, num_rows: int, batch_size: int, *, seed: int, shuffle: bool) -> None:
        self._late: list[int] = []
        super().__init__(num_rows, batch_size, seed=seed, shuffle=shuffle)

    def draw(self, count: int) -> list[int]:
        drawn = self._order[self.cursor : self.cursor + count]
        self.cursor += len(drawn)
        if len(drawn) < count:
            self._late = drawn
            self._begin_epoch()
            self.cursor = count - len(drawn)
            drawn = drawn + self._order[: self.cursor]
        return drawn

    def state(self) -> dict[str, Any]:
        return {**super().state(), "late": list(self._late)}

    def restore(self, state: dict[str, Any]) -> None:
        self._late = list(state["late"])
        super().restore(state)

    def _permutation(self) -> list[int]:
        late = set(self._late)
        return sorted(super()._permutation(), key=late.__contains__)  # the order is kept among equals


def refuse_change(name: str, before: object, now: object) -> None:
    """DataError where an order depends on something that is no longer what it was."""
    if before != now:
        raise DataError(
            f"the order of prompts cannot be continued: {name} was {before}, now {now}",
            "resume with the data and the seed of the checkpoint, or start a new run",
        )
