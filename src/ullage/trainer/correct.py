"""Correction of a step's samples for an engine whose log-probs are not the trainer's: weights, rejection, bypass."""

from __future__ import annotations

from dataclasses import dataclass

from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience
from ullage.config.tree import RolloutCorrection
from ullage.maths import correction
from ullage.telemetry.tally import Tally


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a weight or a statistic may be; without `low`, only `high` bounds it."""

    high: float
    low: float | None = None


class Corrector:
    """The correction of a run, decided once: off where the engine reads the trainer's own weights, unless asked for."""

    def __init__(self, config: RolloutCorrection, ranks: Communicator, *, exact_engine: bool) -> None:
        self.ranks = ranks
        self.bypass = config.bypass_mode
        """The engine's log-probs are the old ones."""
        automatic = None if exact_engine or self.bypass else "token"
        self.level = automatic if config.rollout_is == "auto" else config.rollout_is
        self.bounds = bounds_of(config.rollout_is_threshold)
        self.normalise = config.rollout_is_batch_normalize
        self.rules = rules_of(config.rollout_rs, config.rollout_rs_threshold)

    @property
    def compares(self) -> bool:
        """Whether it looks at the trainer's log-probs before the update."""
        return self.level is not None or bool(self.rules)

    def apply(self, experience: Experience, tally: Tally) -> Experience:
        """The experience with importance weights, and without the tokens that a rule rejects."""
        if not self.compares:
            return experience
        old, rollout, mask = experience.old_logprobs_NT, experience.rollout_logprobs_NT, experience.mask_NT
        assert old is not None, "a run that compares them computes them"
        assert rollout is not None, "the engine gives them"
        rollout = rollout.to(old.dtype)
        # Samples without signal have no log-probs of the trainer's and no part in the update.
        compared = mask & experience.signal_N[:, None]
        kept = compared
        for rule, bounds in self.rules:
            kept = kept & correction.keep(rule, old, rollout, compared, high=bounds.high, low=bounds.low)
        weights = None
        if self.level is not None:
            weights = correction.importance_weights(
                old, rollout, compared, level=self.level, high=self.bounds.high, low=self.bounds.low
            )
            if self.normalise:
                weights = correction.normalised(weights, compared, level=self.level, ranks=self.ranks)
            tally.add("rollout/correction_mean", float(weights[compared].sum()), float(compared.sum()))
        tally.add("rollout/rejected_fraction", float((compared & ~kept).sum()), float(compared.sum()))
        return experience.corrected(mask_NT=kept | (mask & ~compared), correction_NT=weights)


def bounds_of(threshold: float | str) -> Bounds:
    """`2.0`, or `"0.5_2.0"` for two bounds; the config's check has refused everything else."""
    low, _, high = str(threshold).rpartition("_")
    return Bounds(float(high), float(low) if low else None)


def rules_of(names: str | None, thresholds: float | str | None) -> list[tuple[str, Bounds]]:
    """Rejection rules with their bounds; one bound serves all, or each has its own."""
    if not names:
        return []
    rules = [name.strip() for name in names.split(",")]
    given = [bounds_of(threshold.strip()) for threshold in str(thresholds).split(",")]
    return list(zip(rules, given * len(rules) if len(given) == 1 else given, strict=True))
