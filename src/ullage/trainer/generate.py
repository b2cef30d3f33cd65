"""Generation and scoring together: rewards are computed while other samples still decode."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ullage.base.communicator import Communicator
from ullage.base.errors import ServiceError
from ullage.batch.pack import Limits
from ullage.config.tree import Reward
from ullage.data.prompts import Prompt
from ullage.engine.replay import Extent, Replayer, Replays
from ullage.rewards.panel import Panel
from ullage.rewards.pool import Request, Score, check_budget, distinct
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sample, Sampling
from ullage.telemetry.recorder import Recorder
from ullage.workers.reward_model import RewardModel


class Phases(NamedTuple):
    """Under which names the time of a run is booked."""

    generate: str
    score: str


TRAINING = Phases("rollout", "reward")
EVALUATION = Phases("eval", "eval")
MODEL_REMEDY = "give a reward model that can score these conversations"


class SampleSource(Protocol):
    """What answers prompts and scores the answers: a generator, or episodes with an environment."""

    reward_names: list[str]

    def run(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], sampling: Sampling, phases: Phases
    ) -> tuple[list[Sample], list[Score], list[str]]: ...


class Generator:
    """An engine and all that scores, driven as one."""

    def __init__(
        self,
        engine: Engine,
        panel: Panel,
        tokenizer: Any,  # noqa: ANN401 -- transformers' own
        reward: Reward,
        recorder: Recorder,
        ranks: Communicator,
        poll: Callable[[], None],
        *,
        reward_model: RewardModel | None = None,
        reward_model_weight: float = 1.0,
        replays: Replays | None = None,
    ) -> None:
        self.engine = engine
        self._replayer = Replayer(engine.limits, replays, advice=_advice)
        self.panel = panel
        self.reward_names = distinct([*panel.labels, *(["reward_model"] if reward_model else [])])
        """The parts of a score: the config's functions in their order, then the reward model."""
        self.reward_model = reward_model
        self.reward_model_weight = reward_model_weight
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
            self._submit(prompts[sample.group], sample, text)

        def progress(tokens: int, done: int) -> None:
            self.poll()
            self.recorder.progress(done, total, f"{tokens} tokens")

        with self.recorder.phase(phases.generate):
            samples = self.generate(phases, requests, sampling, on_finish=submit, on_progress=progress)
        with self.recorder.phase(phases.score):
            places = [(sample.group, sample.index) for sample in samples]
            found = dict(zip(texts, self._collect(), strict=True))
            asked = [prompts[sample.group] for sample in samples]
            answers = [texts[place] for place in places]
            scores = self._complete(asked, answers, [found[place] for place in places])
            self.check_budget(scores)
        return samples, scores, answers

    def generate(
        self,
        phases: Phases,
        requests: Sequence[GroupRequest],
        sampling: Sampling,
        *,
        on_finish: Callable[[Sample], None],
        on_progress: Callable[[int, int], None],
    ) -> list[Sample]:
        """The engine's samples. Where memory runs out, those that have ended stay; the others begin again."""
        lengths = [len(request.prompt) for request in requests]
        count = sum(len(request.seeds) for request in requests)
        finished: dict[tuple[int, int], Sample] = {}

        def work() -> list[Sample]:
            return self.engine.generate(
                requests,
                sampling,
                limits=self._replayer.limits,
                finished=finished,
                on_finish=on_finish,
                on_progress=on_progress,
            )

        extent = Extent(max(lengths, default=0), sum(lengths), count)
        return self._replayer.run(phases.generate, extent, work)

    def score(self, prompts: Sequence[Prompt], samples: Sequence[Sample], texts: Sequence[str]) -> list[Score]:
        """Scores of answers that are already there, one prompt each.

        Collective; the caller opens the phase, and checks the budget when it has all that a score is made of.
        """
        for prompt, sample, text in zip(prompts, samples, texts, strict=True):
            self._submit(prompt, sample, text)
        return self._complete(prompts, texts, self._collect())

    def _submit(self, prompt: Prompt, sample: Sample, text: str) -> None:
        self.panel.submit(
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

    def _collect(self) -> list[Score]:
        """The panel's scores; a service that ends the run on one rank ends it on all."""
        scores, error = [], None
        try:
            scores = self.panel.collect()
        except ServiceError as problem:
            error = problem
        self.ranks.raise_together(error)
        return scores

    def _complete(self, prompts: Sequence[Prompt], texts: Sequence[str], scores: list[Score]) -> list[Score]:
        """With what the reward model says of the answers that the panel could score."""
        if self.reward_model is not None:
            rated = [index for index, score in enumerate(scores) if score.total is not None]
            verdicts = self.reward_model.scores([prompts[i].prompt for i in rated], [texts[i] for i in rated])
            for index, verdict in zip(rated, verdicts, strict=True):
                scores[index] = with_verdict(
                    scores[index], verdict, name=self.reward_names[-1], weight=self.reward_model_weight
                )
        self.poll()
        return scores

    def check_budget(self, scores: list[Score]) -> None:
        """Failures count over all ranks, so that every rank comes to the same verdict whatever its share.

        Those that the budget allows are a line for the user.
        """
        failures = [[score.error, score.remedy] for score in scores if score.total is None]
        everyone: list[Score] = []
        for scored, theirs in self.ranks.gather([len(scores) - len(failures), failures]):
            everyone += [Score(0.0, {}, None)] * scored
            everyone += [Score(None, {}, error, remedy=remedy) for error, remedy in theirs]
        check_budget(everyone, self.reward.max_failure_fraction)
        errors = [score.error for score in everyone if score.total is None]
        if errors:
            self.recorder.event(f"{len(errors)} of {len(everyone)} answers could not be scored: first: {errors[0]}")


def _advice(limits: Limits) -> str:
    return f"actor_rollout_ref.rollout.max_num_seqs={limits.max_sequences}"


def with_verdict(score: Score, verdict: float | str, *, name: str, weight: float) -> Score:
    """A score and what a reward model adds to it; a verdict that is no number costs the sample."""
    if isinstance(verdict, str):
        return dataclasses.replace(score, total=None, error=verdict, remedy=MODEL_REMEDY)
    total = (score.total or 0.0) + weight * verdict
    if not math.isfinite(total):
        error = f"the reward model gave {verdict}"
        return dataclasses.replace(score, total=None, error=error, remedy=MODEL_REMEDY)
    return dataclasses.replace(score, total=total, parts={**score.parts, name: verdict})
