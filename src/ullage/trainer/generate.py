"""Generation and scoring together: rewards are computed while other samples still decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ullage.base import faults
from ullage.base.communicator import Communicator
from ullage.base.errors import ServiceError
from ullage.config.tree import Reward
from ullage.data.prompts import Prompt
from ullage.rewards.pool import Request, RewardPool, Score, check_budget
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sample, Sampling
from ullage.telemetry.recorder import Recorder


class Phases(NamedTuple):
    """Under which names the time of a run is booked."""

    generate: str
    score: str


TRAINING = Phases("rollout", "reward")
EVALUATION = Phases("eval", "eval")


class Generator:
    """An engine and a reward pool, driven as one."""

    def __init__(
        self,
        engine: Engine,
        pool: RewardPool,
        tokenizer: Any,  # noqa: ANN401 -- transformers' own
        reward: Reward,
        recorder: Recorder,
        ranks: Communicator,
        poll: Callable[[], None],
    ) -> None:
        self.engine = engine
        self.pool = pool
        self.tokenizer = tokenizer
        self.reward = reward
        self.recorder = recorder
        self.ranks = ranks
        self.poll = poll

    def run(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Sampling, step: int, phases: Phases
    ) -> tuple[list[Sample], list[Score], list[str]]:
        """Samples with their scores and texts, ordered by prompt and sample index."""
        requests = [
            GroupRequest(prompt=prompt.token_ids, seeds=tuple(own)) for prompt, own in zip(prompts, seeds, strict=True)
        ]
        total = sum(len(own) for own in seeds)
        texts: dict[tuple[int, int], str] = {}

        def submit(sample: Sample) -> None:
            text = self.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
            texts[sample.group, sample.index] = text
            prompt = prompts[sample.group]
            self.pool.submit(
                Request(
                    prompt=prompt.prompt,
                    response=text,
                    target=prompt.target,
                    source=prompt.source,
                    extra=prompt.extra,
                    response_length=len(sample.token_ids),
                    response_ids=list(sample.token_ids),
                )
            )

        def progress(tokens: int, done: int) -> None:
            self.poll()
            self.recorder.progress(done, total, f"{tokens} tokens")

        with self.recorder.phase(phases.generate):
            faults.strike(phases.generate, step)
            samples = self.engine.generate(requests, sampling, on_finish=submit, on_progress=progress)
        with self.recorder.phase(phases.score):
            faults.strike(phases.score, step)
            scores = self._collect(list(texts))
        places = [(sample.group, sample.index) for sample in samples]
        return samples, [scores[place] for place in places], [texts[place] for place in places]

    def _collect(self, places: list[tuple[int, int]]) -> dict[tuple[int, int], Score]:
        """Scores by place; too many failures on any rank end the run on all of them."""
        scores = self.pool.collect()
        error: ServiceError | None = None
        try:
            check_budget(scores, self.reward.max_failure_fraction)
        except ServiceError as problem:
            error = problem
        self.ranks.raise_together(error)
        return dict(zip(places, scores, strict=True))
