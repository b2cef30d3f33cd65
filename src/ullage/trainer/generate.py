"""Generation and scoring together: rewards are computed while other samples still decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ullage.base.communicator import Communicator
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
        self.reward_names = pool.labels
        self.tokenizer = tokenizer
        self.reward = reward
        self.recorder = recorder
        self.ranks = ranks
        self.poll = poll

    def run(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Sampling, phases: Phases
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
            samples = self.engine.generate(requests, sampling, on_finish=submit, on_progress=progress)
        with self.recorder.phase(phases.score):
            scores = dict(zip(texts, self.pool.collect(), strict=True))
            self._check_budget(list(scores.values()))
            self.poll()
        places = [(sample.group, sample.index) for sample in samples]
        return samples, [scores[place] for place in places], [texts[place] for place in places]

    def _check_budget(self, scores: list[Score]) -> None:
        """Failures count over all ranks, so that every rank comes to the same verdict whatever its share."""
        failures = [score.error for score in scores if score.total is None]
        everyone: list[Score] = []
        for scored, errors in self.ranks.gather([len(scores) - len(failures), failures]):
            everyone += [Score(0.0, {}, None)] * scored + [Score(None, {}, error) for error in errors]
        check_budget(everyone, self.reward.max_failure_fraction)
