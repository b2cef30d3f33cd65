"""Collecting experience: draw prompts, sample completions, score them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ullage.algorithms import Algorithm
from ullage.base.communicator import Communicator
from ullage.base.seeds import derive
from ullage.batch.stages import Experience, Rollouts, concatenate, pad_rows
from ullage.config.tree import Config
from ullage.data.prompts import Prompt
from ullage.data.sampler import PromptSampler
from ullage.maths.advantages import group_has_signal
from ullage.maths.overlong import overlong_penalty
from ullage.rewards.pool import Score
from ullage.rollout.sampling import Sample, Sampling
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.tally import Tally
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.evaluate import passes
from ullage.trainer.generate import TRAINING, SampleSource

Row = dict[str, Any]


class Collector:
    """This rank's share of each step's prompts, answered and scored."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        sampler: PromptSampler,
        generator: SampleSource,
        algorithm: Algorithm,
        ranks: Communicator,
        recorder: Recorder,
        writer: MetricsWriter,
        *,
        full_marks: Mapping[str, float] | None = None,
    ) -> None:
        rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
        self.prompts = prompts
        self.sampler = sampler
        self.generator = generator
        self.algorithm = algorithm
        self.ranks = ranks
        self.recorder = recorder
        self.writer = writer
        self.seed = config.trainer.seed
        self.num_samples = rollout.n
        self.num_prompts = config.data.train_batch_size
        self.max_attempts = config.algorithm.filter_groups.max_num_gen_batches
        self.overlong = config.reward.overlong_buffer
        self.num_logged = config.trainer.log_samples
        self.full_marks = full_marks
        """By source, where the sampler learns how many answers earn them; None: it learns nothing."""
        self.has_many_sources = len({prompt.source for prompt in prompts}) > 1
        self.sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=config.data.max_response_length,
            ignore_eos=rollout.ignore_eos,
            keep_supports=True,
        )
        # A KL or entropy term gives every sample a gradient, whatever its reward.
        self.every_sample_counts = actor.use_kl_loss or actor.entropy_coeff != 0

    def collect(self, step: int, tally: Tally) -> Experience:
        """Phases `rollout` and `reward`; an algorithm that refills goes on until enough groups have signal."""
        parts: list[Experience] = []
        rows: list[Row] = []
        for attempt in range(self.max_attempts):
            part, logged = self._attempt(step, attempt, tally)
            parts.append(part)
            rows += logged
            if not self.algorithm.refills or (found := self._num_groups(parts)) >= self.num_prompts:
                break
        else:
            self.recorder.event(f"only {found} of {self.num_prompts} groups have signal; going on with those")
        self._log(step, rows)
        experience = concatenate(parts)
        return self._first_groups(experience) if self.algorithm.refills else experience

    def _attempt(self, step: int, attempt: int, tally: Tally) -> tuple[Experience, list[Row]]:
        """Every rank draws the whole batch and keeps its share of the prompts."""
        drawn = self.sampler.next_batch()
        places = range(self.ranks.rank, len(drawn), self.ranks.size)
        prompts = [self.prompts[drawn[place]] for place in places]
        order = [attempt * len(drawn) + place for place in places]
        seeds = [[derive(self.seed, step, p.id, i, attempt, 0) for i in range(self.num_samples)] for p in prompts]
        samples, scores, texts = self.generator.run(prompts, seeds, self.sampling, TRAINING)
        experience = to_rollouts(prompts, order, samples).scored(
            rewards_N=self._rewards(samples, scores),
            valid_N=torch.tensor([score.total is not None for score in scores], dtype=torch.bool),
            reward_parts_NK=to_parts(scores, self.generator.reward_names),
        )
        if "greedy_baseline" in self.algorithm.needs:
            experience = experience.compared(self._greedy_rewards(prompts, seeds))
        # By what the answers are worth: a group whose rewards differ only by length teaches nothing else.
        differs = group_has_signal(worth(scores), experience.group_N, experience.valid_N)
        groups = experience.group_N[differs].unique()
        self._report(tally, prompts, samples, scores, with_signal=set(groups.tolist()))
        if self.full_marks is not None:
            rates = success_rates(prompts, samples, scores, self.full_marks)
            everyone = self.ranks.gather([(drawn[places[group]], rate) for group, rate in rates.items()])
            self.sampler.learn({row: rate for part in everyone for row, rate in part})
        if not self.every_sample_counts:
            experience = experience.with_signal(self.algorithm.has_signal(experience))
        if self.algorithm.refills:
            experience = experience.select(torch.isin(experience.group_N, groups).nonzero()[:, 0])
        return experience, self._rows(prompts, order, samples, scores, texts)

    def _rewards(self, samples: Sequence[Sample], scores: Sequence[Score]) -> Tensor:
        """[N] the reward functions' sum, less DAPO's penalty on answers near the length limit; 0 where unscored."""
        rewards = worth(scores)
        if self.overlong is not None:
            limit, buffer, factor = self.sampling.max_tokens, self.overlong.length, self.overlong.penalty_factor
            lengths = [len(sample.token_ids) for sample in samples]
            penalties = [overlong_penalty(n, max_length=limit, buffer=buffer, factor=factor) for n in lengths]
            rewards += torch.tensor(penalties, dtype=torch.float64)
        return rewards

    def _greedy_rewards(self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]]) -> Tensor:
        """[G] what the likeliest answer earns; one that cannot be scored counts as 0.

        The seeds are those of each prompt's first sample: an environment then begins the same episode.
        """
        greedy = dataclasses.replace(self.sampling, temperature=0.0)
        samples, scores, _ = self.generator.run(prompts, [own[:1] for own in seeds], greedy, TRAINING)
        return self._rewards(samples, scores)

    def _num_groups(self, parts: Sequence[Experience]) -> int:
        return int(self.ranks.sum([float(sum(len(part.group_N.unique()) for part in parts))])[0])

    def _first_groups(self, experience: Experience) -> Experience:
        """As many of the groups kept as a step has prompts, the first in global order; all, if there are fewer."""
        order_of = experience.order_G.tolist()
        mine = [order_of[group] for group in experience.group_N.unique().tolist()]
        chosen = sorted(order for part in self.ranks.gather(mine) for order in part)[: self.num_prompts]
        place = {order: new for new, order in enumerate(chosen)}
        kept = [i for i, group in enumerate(experience.group_N.tolist()) if order_of[group] in place]
        order_G = torch.tensor([place.get(order, 0) for order in order_of], dtype=torch.long)
        return dataclasses.replace(experience.select(torch.tensor(kept, dtype=torch.long)), order_G=order_G)

    def _report(
        self,
        tally: Tally,
        prompts: list[Prompt],
        samples: list[Sample],
        scores: list[Score],
        *,
        with_signal: set[int],
    ) -> None:
        """Curves of all sources together and, where there are several, of each."""
        curves = [("", f"{prompt.source}/") if self.has_many_sources else ("",) for prompt in prompts]
        for sample, score in zip(samples, scores, strict=True):
            tally.add("reward/failed_fraction", score.total is None)
            tally.add_tokens("rollout", sample.num_sampled)
            tally.add("response/truncated_fraction", sample.finish_reason == "length")
            for curve in curves[sample.group]:
                tally.add(f"response/{curve}length_mean", len(sample.token_ids))
                if score.total is not None:
                    tally.add(f"reward/{curve}mean", score.total)
                for name, value in score.parts.items():
                    tally.add(f"reward/{curve}{name}", value)
        for group, names in enumerate(curves):
            for curve in names:
                tally.add(f"group/{curve}zero_std_fraction", group not in with_signal)

    def _rows(
        self,
        prompts: list[Prompt],
        order: list[int],
        samples: list[Sample],
        scores: list[Score],
        texts: list[str],
    ) -> list[Row]:
        """The completions among the step's first, for people to read."""
        return [
            {
                "order": order[sample.group],
                "sample": sample.index,
                "prompt_id": prompts[sample.group].id,
                "source": prompts[sample.group].source,
                "prompt": prompts[sample.group].prompt,
                "response": text,
                "target": prompts[sample.group].target,
                "reward": score.total,
                "reward_parts": score.parts,
                "reward_error": score.error,
                "finish_reason": sample.finish_reason,
                "token_ids": list(sample.token_ids),
            }
            for sample, score, text in zip(samples, scores, texts, strict=True)
            if order[sample.group] * self.num_samples + sample.index < self.num_logged
        ]

    def _log(self, step: int, rows: list[Row]) -> None:
        """In the global order of prompts, whatever rank sampled them."""
        everyone = [row for part in self.ranks.gather(rows) for row in part]
        self.writer.samples(step, sorted(everyone, key=lambda row: (row["order"], row["sample"])))


def to_rollouts(prompts: Sequence[Prompt], order: Sequence[int], samples: Sequence[Sample]) -> Rollouts:
    """The engine's samples as the first stage of a step."""
    width = max((len(sample.token_ids) for sample in samples), default=1)
    return Rollouts(
        prompts=tuple(prompt.token_ids for prompt in prompts),
        order_G=torch.tensor(order, dtype=torch.long),
        group_N=torch.tensor([sample.group for sample in samples], dtype=torch.long),
        sample_N=torch.tensor([(order[s.group] << 20) + s.index for s in samples], dtype=torch.long),
        responses=tuple(sample.token_ids for sample in samples),
        mask_NT=pad_rows([s.mask or [1.0] * len(s.token_ids) for s in samples], width=width, dtype=torch.bool),
        rollout_logprobs_NT=pad_rows([sample.logprobs for sample in samples], width=width, dtype=torch.float32),
        finish_reasons=tuple(sample.finish_reason for sample in samples),
        supports=to_supports(samples),
    )


def to_supports(samples: Sequence[Sample]) -> tuple[tuple[Tensor, ...], ...] | None:
    """[N] the ids that each token was drawn from, where the engine left some out."""
    supports = [sample.supports for sample in samples if sample.supports is not None]
    return tuple(supports) if supports else None


def success_rates(
    prompts: Sequence[Prompt], samples: Sequence[Sample], scores: Sequence[Score], full_marks: Mapping[str, float]
) -> dict[int, float]:
    """By group, the share of its scored samples that earned full marks; a group without either is left out."""
    passed: dict[int, list[bool]] = {}
    for sample, score in zip(samples, scores, strict=True):
        marks = full_marks.get(prompts[sample.group].source)
        if score.total is not None and marks is not None:
            passed.setdefault(sample.group, []).append(passes(score.total, marks))
    return {group: sum(own) / len(own) for group, own in passed.items()}


def worth(scores: Sequence[Score]) -> Tensor:
    """[N] the reward functions' weighted sum; 0 where a sample could not be scored."""
    return torch.tensor([score.total or 0.0 for score in scores], dtype=torch.float64)


def to_parts(scores: Sequence[Score], names: Sequence[str]) -> Tensor:
    """[N, K] what each of the named reward functions gave; 0 where it gave nothing."""
    parts = [[score.parts.get(name, 0.0) for name in names] for score in scores]
    return torch.tensor(parts, dtype=torch.float64).reshape(len(scores), len(names))
