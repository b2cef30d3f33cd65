"""Evaluation on held-out prompts: mean@n, pass@k, best@k and maj@k, per source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ullage.base.communicator import Communicator
from ullage.base.seeds import derive
from ullage.config.tree import Config
from ullage.data.prompts import Prompt
from ullage.maths.evaluation import best_at, majority_at, mean_at, pass_at
from ullage.rollout.sampling import Sampling
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.generate import EVALUATION, SampleSource


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of one pass over the held-out prompts."""

    metrics: dict[str, float]
    score: float
    """Mean reward over all samples: what `best` compares."""
    rows: list[dict[str, Any]]
    """Every sample, in the order of the prompts."""


class Evaluator:
    """Every held-out prompt, `n` samples each; the same seeds every time, so that two evaluations compare weights."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        generator: SampleSource,
        ranks: Communicator,
        writer: MetricsWriter,
        *,
        full_marks: Mapping[str, float],
    ) -> None:
        val = config.actor_rollout_ref.rollout.val_kwargs
        self.prompts = prompts
        self.generator = generator
        self.ranks = ranks
        self.writer = writer
        self.seed = config.trainer.seed
        self.num_samples = val.n
        self.full_marks = full_marks
        """By source: a sample passes when its reward reaches this. A source without has no pass@k."""
        self.sampling = Sampling(
            temperature=val.temperature,
            top_p=val.top_p,
            top_k=val.top_k,
            max_tokens=config.data.max_response_length,
        )

    def evaluate(self, step: int) -> Evaluation:
        mine = self.prompts[self.ranks.rank :: self.ranks.size]
        seeds = [[derive(self.seed, "eval", p.id, i, 0, 0) for i in range(self.num_samples)] for p in mine]
        samples, scores, texts = self.generator.run(mine, seeds, self.sampling, EVALUATION)
        rows = []
        for sample, score, text in zip(samples, scores, texts, strict=True):
            prompt = mine[sample.group]
            rows.append(
                {
                    "prompt_id": prompt.id,
                    "sample": sample.index,
                    "source": prompt.source,
                    "prompt": prompt.prompt,
                    "response": text,
                    "target": prompt.target,
                    "answer": score.answer,
                    "reward": score.total if score.total is not None else 0.0,  # unscored counts as wrong
                    "reward_error": score.error,
                }
            )
        everyone = [row for part in self.ranks.gather(rows) for row in part]
        everyone.sort(key=lambda row: (row["prompt_id"], row["sample"]))
        self.writer.evaluation(step, everyone)
        return Evaluation(metrics_of(everyone, self.full_marks), mean_at([row["reward"] for row in everyone]), everyone)


def metrics_of(rows: Sequence[Mapping[str, Any]], full_marks: Mapping[str, float]) -> dict[str, float]:
    """Every score of every source, `eval/<source>/<score>`, from the samples of all ranks: means over prompts."""
    sources: dict[str, dict[int, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        sources[row["source"]][row["prompt_id"]].append(row)
    return {
        f"eval/{source}/{name}": value
        for source, prompts in sources.items()
        for name, value in _scores(list(prompts.values()), full_marks.get(source))
    }


def passes(reward: float, full_marks: float) -> bool:
    """Whether an answer earned all there is to earn, whatever its weights round to."""
    return reward >= full_marks - 1e-6


def _scores(prompts: Sequence[Sequence[Mapping[str, Any]]], full_marks: float | None) -> Iterator[tuple[str, float]]:
    """Name and value of one source's scores; every prompt has its n samples."""
    rewards = [[row["reward"] for row in samples] for samples in prompts]
    n = len(rewards[0])
    yield f"mean@{n}", mean_at([mean_at(own) for own in rewards])
    if full_marks is not None:
        passed = [sum(passes(reward, full_marks) for reward in own) for own in rewards]
        for k in draws(n):
            yield f"pass@{k}", mean_at([pass_at(n, number, k) for number in passed])
    for k in draws(n):
        yield f"best@{k}", mean_at([best_at(own, k) for own in rewards])
    if not _tell_answers(prompts):
        return
    # A response without an answer votes too: for there being none.
    answers = [[row["answer"] or None for row in samples] for samples in prompts]
    for k in draws(n):
        yield f"maj@{k}", mean_at([majority_at(said, own, k) for said, own in zip(answers, rewards, strict=True)])


def _tell_answers(prompts: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    """Whether the reward told the answer of every sample that it could score."""
    scored = [row["answer"] for samples in prompts for row in samples if row["reward_error"] is None]
    return bool(scored) and None not in scored


def draws(n: int) -> list[int]:
    """The k of n samples that are reported: the powers of two, and n itself."""
    return sorted({n, *(2**power for power in range(n.bit_length()))})
