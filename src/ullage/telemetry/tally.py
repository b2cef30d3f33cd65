"""Sums and counts kept by each rank, combined into means over all ranks."""

from __future__ import annotations

from ullage.base.communicator import Communicator


class Tally:
    """A mean is a sum and a count until the very end, so that no rank's or micro-batch's size distorts it."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._tokens: dict[str, float] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] += float(total)
        entry[1] += float(count)

    def add_tokens(self, phase: str, tokens: float) -> None:
        """Tokens this rank worked through in a phase."""
        self._tokens[phase] = self._tokens.get(phase, 0.0) + tokens

    def tokens(self, ranks: Communicator) -> dict[str, float]:
        """Tokens by phase, over all ranks."""
        combined: dict[str, float] = {}
        for part in ranks.gather(self._tokens):
            for phase, tokens in part.items():
                combined[phase] = combined.get(phase, 0.0) + tokens
        return combined

    def means(self, ranks: Communicator) -> dict[str, float]:
        """Means over all ranks; names nobody counted are left out."""
        combined: dict[str, list[float]] = {}
        for part in ranks.gather(self._sums):
            for name, (total, count) in part.items():
                entry = combined.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += count
        return {name: total / count for name, (total, count) in combined.items() if count}
