"""Collecting experience: draw prompts, sample completions, score them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ullage.algorithms import Algorithm
from ullage.base.communicator import Communicator
from ullage.base.seeds import derive
from ullage.batch.stages import Experience, Rollouts, pad_rows
from ullage.config.tree import Config
from ullage.data.prompts import Prompt
from ullage.data.sampler import Sampler
from ullage.rewards.pool import Score
from ullage.rollout.sampling import Sample, Sampling
from ullage.telemetry.recorder import Recorder
from ullage.telemetry.tally import Tally
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.generate import TRAINING, Generator


class Collector:
    """This rank's share of each step's prompts, answered and scored."""

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        sampler: Sampler,
        generator: Generator,
        algorithm: Algorithm,
        ranks: Communicator,
        recorder: Recorder,
        writer: MetricsWriter,
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
        self.num_logged = config.trainer.log_samples
        self.sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=config.data.max_response_length,
            ignore_eos=rollout.ignore_eos,
        )
        # A KL or entropy term gives every sample a gradient, whatever its reward.
        self.every_sample_counts = actor.use_kl_loss or actor.entropy_coeff != 0

    def collect(self, step: int, tally: Tally) -> Experience:
        """Phases `rollout` and `reward`: every rank draws the whole batch and keeps its share of the prompts."""
        drawn = self.sampler.next_batch()
        order = list(range(self.ranks.rank, len(drawn), self.ranks.size))
        prompts = [self.prompts[drawn[place]] for place in order]
        seeds = [[derive(self.seed, step, p.id, i, 0, 0) for i in range(self.num_samples)] for p in prompts]
        samples, scores, texts = self.generator.run(prompts, seeds, self.sampling, TRAINING)
        rollouts = to_rollouts(prompts, order, samples)
        rewards = torch.tensor([score.total or 0.0 for score in scores], dtype=torch.float64)
        experience = rollouts.scored(
            rewards_N=rewards,
            valid_N=torch.tensor([score.total is not None for score in scores], dtype=torch.bool),
        )
        signal_N = self.algorithm.has_signal(experience)
        self._report(tally, samples, scores, num_groups=len(prompts), with_signal=experience.group_N[signal_N].tolist())
        if not self.every_sample_counts:
            experience = experience.with_signal(signal_N)
        self._log(step, prompts, order, samples, scores, texts)
        return experience

    def _report(
        self, tally: Tally, samples: list[Sample], scores: list[Score], *, num_groups: int, with_signal: list[int]
    ) -> None:
        for sample, score in zip(samples, scores, strict=True):
            tally.add("reward/failed_fraction", score.total is None)
            tally.add("response/length_mean", len(sample.token_ids))
            tally.add_tokens("rollout", len(sample.token_ids))
            tally.add("response/truncated_fraction", sample.finish_reason == "length")
            if score.total is not None:
                tally.add("reward/mean", score.total)
            for name, value in score.parts.items():
                tally.add(f"reward/{name}", value)
        tally.add("group/zero_std_fraction", num_groups - len(set(with_signal)), num_groups)

    def _log(
        self,
        step: int,
        prompts: list[Prompt],
        order: list[int],
        samples: list[Sample],
        scores: list[Score],
        texts: list[str],
    ) -> None:
        """The step's first completions, in the global order of prompts, whatever rank sampled them."""
        rows = [
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
        everyone = [row for part in self.ranks.gather(rows) for row in part]
        self.writer.samples(step, sorted(everyone, key=lambda row: (row["order"], row["sample"])))


def to_rollouts(prompts: Sequence[Prompt], order: Sequence[int], samples: Sequence[Sample]) -> Rollouts:
    """The engine's samples as the first stage of a step."""
    width = max((len(sample.token_ids) for sample in samples), default=1)
    return Rollouts(
        prompts=tuple(prompt.token_ids for prompt in prompts),
        order_G=torch.tensor(order, dtype=torch.long),
        group_N=torch.tensor([sample.group for sample in samples], dtype=torch.long),
        responses=tuple(sample.token_ids for sample in samples),
        mask_NT=pad_rows([[1.0] * len(sample.token_ids) for sample in samples], width=width, dtype=torch.bool),
        rollout_logprobs_NT=pad_rows([sample.logprobs for sample in samples], width=width, dtype=torch.float32),
        finish_reasons=tuple(sample.finish_reason for sample in samples),
    )
