"""Supervised training's place in the loop: given answers as experience, and the loss on held-out ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience, Rollouts, pad_rows
from ullage.data.completions import Demonstration
from ullage.data.sampler import PromptSampler
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.tally import Tally
from ullage.trainer.evaluate import Evaluation, Evaluator
from ullage.workers.actor import Actor

AT_ONCE = 64
"""Held-out answers evaluated together."""


class DemonstrationCollector:
    """This rank's share of each step's given answers; nothing is sampled, so nothing is scored."""

    def __init__(self, demonstrations: Sequence[Demonstration], sampler: PromptSampler, ranks: Communicator) -> None:
        self.demonstrations = demonstrations
        self.sampler = sampler
        self.ranks = ranks

    def collect(self, step: int, tally: Tally) -> Experience:
        del step  # the sampler knows where it is
        drawn = self.sampler.next_batch()
        places = range(self.ranks.rank, len(drawn), self.ranks.size)
        chosen = [self.demonstrations[drawn[place]] for place in places]
        for demonstration in chosen:
            tally.add("response/length_mean", len(demonstration.response))
        return to_experience(chosen, places)


class LossEvaluator:
    """Mean negative log-likelihood per token of held-out answers, by source; rewards too where the run has any."""

    def __init__(
        self,
        demonstrations: Sequence[Demonstration],
        actor: Actor,
        ranks: Communicator,
        recorder: Recorder,
        *,
        rewards: Evaluator | None,
    ) -> None:
        self.demonstrations = demonstrations
        self.actor = actor
        self.ranks = ranks
        self.recorder = recorder
        self.rewards = rewards

    def evaluate(self, step: int) -> Evaluation:
        with self.recorder.phase("eval"):
            sums = self._sums()
        metrics = {f"eval/{source}/loss": total / tokens for source, (total, tokens) in sums.items()}
        overall = math.fsum(total for total, _ in sums.values()) / math.fsum(tokens for _, tokens in sums.values())
        if self.rewards is None:
            return Evaluation(metrics, -overall, [])
        rewarded = self.rewards.evaluate(step)
        return Evaluation(rewarded.metrics | metrics, rewarded.score, rewarded.rows)

    def _sums(self) -> dict[str, tuple[float, float]]:
        """Negative log-likelihood and tokens of each source, over all ranks."""
        mine = self.demonstrations[self.ranks.rank :: self.ranks.size]
        own: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for start in range(0, len(mine), AT_ONCE):
            part = mine[start : start + AT_ONCE]
            experience = to_experience(part, range(len(part)))
            logprobs = self.actor.logprobs(experience, [torch.arange(len(part))])
            for demonstration, likelihood in zip(part, logprobs.double().sum(-1).tolist(), strict=True):
                own[demonstration.prompt.source][0] -= likelihood
                own[demonstration.prompt.source][1] += len(demonstration.response)
            self.recorder.progress(start + len(part), len(mine), "answers")
        sums: dict[str, tuple[float, float]] = {}
        for theirs in self.ranks.gather(dict(own)):
            for source, (total, tokens) in theirs.items():
                before = sums.get(source, (0.0, 0.0))
                sums[source] = (before[0] + total, before[1] + tokens)
        return dict(sorted(sums.items()))


def to_experience(demonstrations: Sequence[Demonstration], order: Sequence[int]) -> Experience:
    """Given answers as samples: each the only one of its prompt."""
    lengths = [len(demonstration.response) for demonstration in demonstrations]
    number = torch.arange(len(demonstrations))
    rollouts = Rollouts(
        prompts=tuple(demonstration.prompt.token_ids for demonstration in demonstrations),
        order_G=torch.tensor(order, dtype=torch.long),
        group_N=number,
        sample_N=torch.tensor(order, dtype=torch.long),
        responses=tuple(demonstration.response for demonstration in demonstrations),
        mask_NT=pad_rows([[1.0] * length for length in lengths], width=max(lengths, default=1), dtype=torch.bool),
        rollout_logprobs_NT=None,
        finish_reasons=("stop",) * len(lengths),
    )
    nothing = torch.zeros(len(lengths), dtype=torch.float64)
    return rollouts.scored(rewards_N=nothing, valid_N=torch.ones(len(lengths), dtype=torch.bool))
