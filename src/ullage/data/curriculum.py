"""A curriculum by success rate: prompts that are always or never solved teach little, so they come up less often."""

from collections.abc import Mapping
from typing import Any

from ullage.base.seeds import derive
from ullage.data.sampler import Sampler

LEAST_CHANCE = 0.1
"""Of a prompt that is always or never solved: the policy changes, so it is tried again every tenth epoch or so."""


def chance(rate: float) -> float:
    """How likely an epoch is to draw a prompt of this success rate: 4 p (1 - p), the variance of its reward, at least
    `LEAST_CHANCE`.

    >>> [chance(rate) for rate in (0.0, 0.25, 0.5, 1.0)]
    [0.1, 0.75, 1.0, 0.1]
    """
    return max(4 * rate * (1 - rate), LEAST_CHANCE)


class Curriculum(Sampler):
    """Walks the plain sampler's permutations and passes over each row with the chance that its last rate leaves.

    Rows without a rate are always drawn, so the first epoch is the plain one. A batch may reach into the next epoch,
    without drawing a row twice.
    """

    def __init__(self, num_rows: int, batch_size: int, *, seed: int, shuffle: bool) -> None:
        super().__init__(num_rows, batch_size, seed=seed, shuffle=shuffle)
        self.rates: list[float | None] = [None] * num_rows
        """The success rate of each row when it was last drawn."""

    def draw(self, count: int) -> list[int]:
        """The next so many rows that are not passed over."""
        drawn: dict[int, None] = {}
        while len(drawn) < count:
            if self.cursor == self.num_rows:
                self._begin_epoch()
            row = self._order[self.cursor]
            self.cursor += 1
            if row not in drawn and self._is_wanted(row):
                drawn[row] = None
        return list(drawn)

    def learn(self, rates: Mapping[int, float]) -> None:
        for row, rate in rates.items():
            self.rates[row] = rate

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rates": list(self.rates)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.rates = list(state["rates"])

    def _is_wanted(self, row: int) -> bool:
        """By a coin of this row in this epoch, so that the past need not be replayed to continue."""
        rate = self.rates[row]
        return rate is None or derive(self.seed, "curriculum", self.epoch, row) < chance(rate) * 2**63
