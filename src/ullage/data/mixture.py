"""Several sources in one batch, in given shares; each is drawn by a sampler of its own."""

import difflib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ullage.base.errors import ConfigError, DataError
from ullage.base.seeds import derive
from ullage.data.curriculum import Curriculum
from ullage.data.sampler import Walk, refuse_change


class Mixture:
    """Batches that hold every source by its weight.

    Each place of a batch goes to the source that is furthest behind its share of everything drawn so far. What one
    batch rounds off, the next ones make up: over many batches the shares are exact. A source that runs out begins its
    next epoch, whatever the others do; an epoch of the run is as many batches as the rows of all sources fill.
    """

    def __init__(
        self,
        rows: Mapping[str, Sequence[int]],
        weights: Mapping[str, float],
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        curriculum: bool = False,
    ) -> None:
        """`rows` are the indices of each source's rows."""
        check_weights(weights, rows)
        self.rows = rows
        self.weights = dict(weights)
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._refuse_small_sources()
        part = Curriculum if curriculum else Walk
        # A batch of one: how many rows it gives is decided here, batch by batch.
        self.parts = {name: part(len(rows[name]), 1, seed=derive(seed, name), shuffle=shuffle) for name in weights}
        self.drawn = dict.fromkeys(weights, 0)
        """Rows drawn from each source so far."""
        self._place_of = {row: (name, place) for name in weights for place, row in enumerate(rows[name])}

    @property
    def batches_per_epoch(self) -> int:
        return sum(map(len, self.rows.values())) // self.batch_size

    def next_batch(self) -> list[int]:
        total = sum(self.drawn.values())
        sources = self._sources_of_batch(total)
        counts = {name: sources.count(name) for name in self.weights}
        drawn = {name: iter(self.parts[name].draw(count)) for name, count in counts.items()}
        batch = [self.rows[name][next(drawn[name])] for name in sources]
        for name, count in counts.items():
            self.drawn[name] += count
        if self.shuffle:  # ranks take turns: a pattern would give each rank a source of its own
            random.Random(derive(self.seed, "batch order", total)).shuffle(batch)
        return batch

    def learn(self, rates: Mapping[int, float]) -> None:
        for row, rate in rates.items():
            name, place = self._place_of[row]
            self.parts[name].learn({place: rate})

    def state(self) -> dict[str, Any]:
        return {
            "mixing_weights": dict(self.weights),
            "drawn": dict(self.drawn),
            "parts": {name: part.state() for name, part in self.parts.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        refuse_change("data.mixing_weights", state["mixing_weights"], self.weights)
        self.drawn = dict(state["drawn"])
        for name, part in self.parts.items():
            part.restore(state["parts"][name])

    def _sources_of_batch(self, total: int) -> list[str]:
        """The source of each place, after `total` rows."""
        left = {name: len(self.rows[name]) for name in self.weights}  # no row twice in a batch
        drawn, all_weights = dict(self.drawn), sum(self.weights.values())
        sources: list[str] = []
        for number in range(total + 1, total + 1 + self.batch_size):
            # Times the sum of weights, so that whole-number weights are compared exactly.
            behind = {name: self.weights[name] * number - drawn[name] * all_weights for name in left if left[name]}
            name = max(behind, key=behind.__getitem__)  # the first of equals
            sources.append(name)
            drawn[name] += 1
            left[name] -= 1
        return sources

    def _refuse_small_sources(self) -> None:
        for name, weight in self.weights.items():
            share = self.batch_size * weight / sum(self.weights.values())
            if len(self.rows[name]) < share:
                raise DataError(
                    f"the source '{name}' has {len(self.rows[name])} prompts, fewer than its share of a batch: "
                    f"{share:.4g} of data.train_batch_size={self.batch_size}",
                    f"lower data.train_batch_size or data.mixing_weights.{name}, or add data",
                )


def check_weights(weights: Mapping[str, float], sources: Collection[str]) -> None:
    """ConfigError unless exactly the sources of the data have a weight."""
    known = ", ".join(sources)
    for name in weights:
        if name not in sources:
            near = difflib.get_close_matches(name, sources, n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise ConfigError(
                f"data.mixing_weights.{name}: no training prompt is of this source", f"{hint}The data has {known}"
            )
    missing = [name for name in sources if name not in weights]
    if missing:
        raise ConfigError(
            f"data.mixing_weights: no weight for the source(s) {', '.join(missing)}; the data has {known}",
            "give every source a weight, or leave its rows out of data.train_files",
        )
