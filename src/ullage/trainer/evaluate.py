"""Evaluation on held-out prompts: mean@n and the unbiased pass@k, per source."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ullage.base.communicator import Communicator
from ullage.base.seeds import derive
from ullage.config.tree import Config
from ullage.data.prompts import Prompt
from ullage.rollout.sampling import Sampling
from ullage.telemetry.tally import Tally
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.generate import EVALUATION, Generator


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
        generator: Generator,
        ranks: Communicator,
        writer: MetricsWriter,
        *,
        full_marks: float,
    ) -> None:
        val = config.actor_rollout_ref.rollout.val_kwargs
        self.prompts = prompts
        self.generator = generator
        self.ranks = ranks
        self.writer = writer
        self.seed = config.trainer.seed
        self.num_samples = val.n
        self.full_marks = full_marks
        """A sample passes when its reward reaches this."""
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
        rewards: dict[int, list[float]] = defaultdict(list)
        rows = []
        for sample, score, text in zip(samples, scores, texts, strict=True):
            prompt = mine[sample.group]
            reward = score.total if score.total is not None else 0.0  # unscored counts as wrong
            rewards[sample.group].append(reward)
            rows.append(
                {
                    "prompt_id": prompt.id,
                    "sample": sample.index,
                    "source": prompt.source,
                    "prompt": prompt.prompt,
                    "response": text,
                    "target": prompt.target,
                    "reward": reward,
                    "reward_error": score.error,
                }
            )
        tally = Tally()
        for group, values in rewards.items():
            self._add(tally, mine[group].source, values)
        metrics = tally.means(self.ranks)
        score_mean = metrics.pop("score")
        everyone = [row for part in self.ranks.gather(rows) for row in part]
        everyone.sort(key=lambda row: (row["prompt_id"], row["sample"]))
        self.writer.evaluation(step, everyone)
        return Evaluation(metrics, score_mean, everyone)

    def _add(self, tally: Tally, source: str, rewards: list[float]) -> None:
        n = len(rewards)
        tally.add("score", sum(rewards) / n)
        tally.add(f"eval/{source}/mean@{n}", sum(rewards) / n)
        passed = sum(reward >= self.full_marks - 1e-6 for reward in rewards)
        k = 1
        while k <= n:
            tally.add(f"eval/{source}/pass@{k}", pass_at_k(n, passed, k))
            k *= 2


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Unbiased chance that at least one of k samples passes, from n of which `passed` did (arXiv:2107.03374 eq. 1)."""
    if n - passed < k:
        return 1.0
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)
