"""Every metric name a run declares, with its unit, its meaning, and how several values of one step become one.

A name may hold placeholders, such as `time/<phase>`. Names that are not here are allowed: they are averaged.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

Reduction = Literal["mean", "sum", "max", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric is."""

    unit: str
    meaning: str
    reduction: Reduction = "mean"
    best: Literal["highest", "lowest"] = "highest"
    """Which value of an evaluation is the best."""


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("score", "weighted sum of the reward functions, mean over the step's samples"),
    "reward/failed_fraction": Metric("share", "samples that could not be scored: error, time limit, not a number"),
    "reward/<source>/mean": Metric("score", "the same over the samples of one source, where there are several"),
    "reward/<function>": Metric("score", "mean of one reward function, before its weight"),
    "response/length_mean": Metric("tokens", "length of a sampled response"),
    "response/<source>/length_mean": Metric("tokens", "the same over the samples of one source"),
    "response/truncated_fraction": Metric("share", "responses cut off at max_response_length"),
    "group/zero_std_fraction": Metric("share", "groups whose samples all have the same reward: no signal"),
    "group/<source>/zero_std_fraction": Metric("share", "the same over the groups of one source"),
    "actor/loss": Metric("nats", "policy loss, with KL and entropy terms where they are on"),
    "actor/kl_ref": Metric("nats per token", "distance of the policy from the reference"),
    "actor/kl_old": Metric("nats per token", "distance of the policy from the one that sampled"),
    "actor/entropy": Metric("nats per token", "entropy of the policy over the whole vocabulary"),
    "actor/clip_fraction": Metric("share", "response tokens whose ratio was clipped"),
    "actor/grad_norm": Metric("norm", "global gradient norm before clipping"),
    "actor/learning_rate": Metric("per update", "step size of the optimizer", "last"),
    "actor/skipped_steps": Metric("share", "optimizer steps skipped: gradient not finite"),
    "critic/loss": Metric("score squared", "value loss"),
    "critic/clip_fraction": Metric("share", "response tokens whose value was clipped"),
    "critic/grad_norm": Metric("norm", "global gradient norm before clipping"),
    "critic/learning_rate": Metric("per update", "step size of the critic's optimizer", "last"),
    "critic/skipped_steps": Metric("share", "optimizer steps of the critic skipped: gradient not finite"),
    "critic/explained_variance": Metric("share", "variance of the returns that the values explain"),
    "rollout/logprob_gap_mean": Metric("nats", "mean distance between the engine's and the trainer's log-probs"),
    "rollout/tokens_per_second": Metric("tokens/s", "tokens sampled per second of the rollout phase"),
    "update/tokens_per_second": Metric("tokens/s", "tokens trained per second of the update phase"),
    "update/mfu": Metric("share", "model FLOPs of the update as a share of the device's peak"),
    "time/step": Metric("s", "whole step", "sum"),
    "time/<phase>": Metric("s", "time in one phase, without phases inside it", "sum"),
    "memory/replays": Metric("times", "phases repeated because memory ran out, over all ranks", "sum"),
    "memory/<phase>_peak_bytes": Metric("bytes", "peak of allocated memory in one phase", "max"),
    "eval/<source>/pass@<k>": Metric("share", "held-out prompts solved by at least one of k samples, unbiased", "last"),
    "eval/<source>/best@<k>": Metric("score", "expected best score of k samples to one prompt, unbiased", "last"),
    "eval/<source>/maj@<k>": Metric("score", "expected score of the most frequent answer of k samples", "last"),
    "eval/<source>/loss": Metric("nats per token", "loss on held-out answers of one source", "last", "lowest"),
    "eval/<source>/<score>": Metric("score", "score on held-out prompts of one source", "last"),
}
_AVERAGED = Metric("", "")


@cache
def describe(name: str) -> Metric:
    """The declaration that `name` falls under; exact names come before patterns."""
    if name in METRICS:
        return METRICS[name]
    for pattern, metric in METRICS.items():
        parts = re.split(r"<\w+>", pattern)
        if len(parts) > 1 and re.fullmatch(".+".join(map(re.escape, parts)), name):
            return metric
    return _AVERAGED


def reduce_values(name: str, values: Sequence[float]) -> float:
    """One value for the step out of the ones recorded."""
    match describe(name).reduction:
        case "sum":
            return sum(values)
        case "max":
            return max(values)
        case "last":
            return values[-1]
        case "mean":
            return sum(values) / len(values)


def headline_evaluation(metrics: Mapping[str, float | None]) -> float | None:
    """The one number an evaluation is known by: its first score that is not a pass@k, averaged over sources."""
    values = [value for name in _headline_names(metrics) if (value := metrics[name]) is not None]
    return sum(values) / len(values) if values else None


def best_evaluation(rows: Iterable[tuple[int, Mapping[str, float | None]]]) -> tuple[float, int] | None:
    """Of steps and their metrics, the best headline and the first step that reached it."""
    found = []
    for step, metrics in rows:
        value = headline_evaluation(metrics)
        if value is not None and math.isfinite(value):
            lowest = describe(_headline_names(metrics)[0]).best == "lowest"
            found.append((-value if lowest else value, -step, value))
    if not found:
        return None
    _, step, value = max(found)
    return value, -step


def _headline_names(metrics: Mapping[str, float | None]) -> list[str]:
    scores = [name for name in metrics if name.startswith("eval/") and "/pass@" not in name]
    return [name for name in scores if name.rpartition("/")[2] == scores[0].rpartition("/")[2]]
