"""A step rehearsed: the run's own roles, built from its config with random weights, and one step of the longest kind.

On a device it is a run without a model's files; on a `TracedTarget` it is what the run will allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ullage.algorithms import Algorithm
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.base.seeds import derive
from ullage.batch.pack import pack
from ullage.batch.stages import Experience
from ullage.config.check import SUPERVISED
from ullage.config.tree import Config
from ullage.data.prompts import Prompt
from ullage.engine.optimizer import Optimizer
from ullage.engine.replay import Replays
from ullage.model.language_model import LanguageModel
from ullage.model.load import DTYPES
from ullage.model.random_weights import random_model
from ullage.model.target import Target
from ullage.model.trunk import Trunk
from ullage.model.value_model import ValueModel, add_value_head
from ullage.planner.passes import Block, Room, worst_mixes
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.graphs import Capturing
from ullage.rollout.sampling import GroupRequest, Sample, Sampling
from ullage.run.roles import fresh_adapter, make_actor, make_critic, make_reference
from ullage.run.supply import make_engine
from ullage.telemetry.tally import Tally
from ullage.trainer.collect import to_rollouts
from ullage.trainer.correct import Corrector
from ullage.trainer.loop import needs_old_logprobs
from ullage.trainer.schedule import Schedule
from ullage.workers.passes import Phase

Mix = Literal["drawn", "fullest"]
FIRST_ID = 10
"""Prompts are made of ordinary ids."""


def _longest(group: int, index: int, length: int) -> Sample:
    return Sample(
        group=group,
        index=index,
        token_ids=(FIRST_ID,) * length,
        logprobs=(0.0,) * length,
        finish_reason="length",
    )


class Rehearsal:
    """The roles of a run, and steps of theirs.

    Args:
        config: settled.
        architecture: of the actor's model.
        critic_architecture: of the critic's, where that is another one.
        samples: draw the completions token by token; else the engine only needs the memory that takes.
        mix: what is learned from. `drawn`: the sequences of the rollout, all as long as they may be; `fullest`: the
            fullest micro-batches that the token limits allow, which a mix of lengths may come to.
        stop_ids: tokens that end a completion; by default all are as long as they may be.
        every_phase: evaluate the old policy even where a run's steps have no use for it.
        capture: in place of a device that is only traced.
    """

    rate = 1e-6
    """At which is learned."""

    def __init__(
        self,
        config: Config,
        architecture: PretrainedConfig,
        target: Target,
        phase: Phase,
        *,
        critic_architecture: PretrainedConfig | None = None,
        samples: bool = True,
        mix: Mix = "drawn",
        stop_ids: frozenset[int] | None = None,
        every_phase: bool = True,
        replays: Replays | None = None,
        capture: Capturing | None = None,
    ) -> None:
        self.config, self.target, self.phase = config, target, phase
        self.samples, self.mix = samples, mix
        self._stop_ids = stop_ids
        self._architecture = architecture
        self._critic_architecture = critic_architecture or architecture
        self.algorithm: Algorithm = compose(config)
        replays = replays or Replays(enabled=config.memory.replay)
        with phase("load"):
            model = self._actor_model(config, target)
        self.actor = make_actor(config, model, Solo(), phase, replays)
        self.critic = make_critic(config, self.algorithm, self.actor, phase, replays, load=self._value_model)
        self.engine = self._engine(model, capture)
        wanted = config.actor_rollout_ref.actor.use_kl_loss or "reference" in self.algorithm.needs
        self.reference = (
            make_reference(config, self.actor, phase, replays, load=self._reference_model) if wanted else None
        )
        self.schedule = Schedule(config, self.algorithm.aggregation, Solo())
        corrector = Corrector(config.algorithm.rollout_correction, Solo(), exact_engine=Engine.reads_trainer_weights)
        needed = every_phase or needs_old_logprobs(self.algorithm, self.schedule, corrector)
        self._evaluates, self._bypasses = needed and not self._supervised, corrector.bypass

    @property
    def optimizers(self) -> list[Optimizer]:
        """Of the roles that are trained."""
        return [self.actor.optimizer, *([self.critic.optimizer] if self.critic else [])]

    def step(self, step: int = 1) -> list[Sample]:
        """Sample, score by a coin, evaluate, assign credit, update; every sequence as long as it may be."""
        prompts = self._prompts(step)
        samples = self._rollout(prompts, step)
        if self.mix == "drawn":
            self._learn(prompts, samples if self.samples else self._two_micro_batches(samples), step)
        else:
            for blocks in self._fullest_mixes():
                self._learn(*self._of_blocks(prompts, blocks), step)
        return samples

    def _learn(self, prompts: Sequence[Prompt], samples: Sequence[Sample], step: int) -> None:
        rewards = torch.tensor([float(sample.index % 2) for sample in samples], dtype=torch.float64)
        experience = to_rollouts(prompts, range(len(prompts)), samples).scored(
            rewards_N=rewards, valid_N=torch.ones(len(samples), dtype=torch.bool)
        )
        plan = self.schedule.plan(experience, step)
        experience = experience.evaluated(
            old_logprobs=self._old_logprobs(experience, plan),
            ref_logprobs=self.reference.logprobs(experience, plan) if self.reference else None,
            values=self.critic.values(experience, plan) if self.critic else None,
        )
        batch = self.algorithm.assign_credit(experience, Solo())
        with self.phase("update"):
            for mini_batch in self.schedule.mini_batches(batch, step):
                self.actor.update(mini_batch, self.algorithm, self.rate, Tally())
                if self.critic:
                    self.critic.update(mini_batch, self.rate, Tally())

    def _old_logprobs(self, experience: Experience, plan: list[Tensor]) -> Tensor | None:
        if self._evaluates:
            return self.actor.logprobs(experience, plan)
        return experience.rollout_logprobs_NT if self._bypasses else None

    def _rollout(self, prompts: list[Prompt], step: int) -> list[Sample]:
        rollout, length = self.config.actor_rollout_ref.rollout, self.config.data.max_response_length
        count = 1 if self._supervised else rollout.n
        if self.engine is not None:
            seeds = [tuple(derive(step, prompt.id, i) for i in range(count)) for prompt in prompts]
            requests = [GroupRequest(prompt=p.token_ids, seeds=own) for p, own in zip(prompts, seeds, strict=True)]
            sampling = Sampling(
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                max_tokens=length,
                ignore_eos=self._stop_ids is None,
            )
            if self.samples:
                with self.phase("rollout"):
                    return self.engine.generate(requests, sampling)
            for _ in range(2 if self.engine.graphs.enabled else 1):  # later prompts meet the graphs of the first step
                with self.phase("rollout"):
                    self.engine.rehearse(requests, sampling)
        return [_longest(group, index, length) for group in range(len(prompts)) for index in range(count)]

    def _fullest_mixes(self) -> list[list[Block]]:
        """For the token limits of every role."""
        data, count = self.config.data, 1 if self._supervised else self.config.actor_rollout_ref.rollout.n
        found: list[list[Block]] = []
        for role in (self.actor, self.critic, self.reference):
            if role is not None:
                room = Room(
                    tokens=role.limits.max_tokens,
                    groups=min(self.schedule.mini_batch_prompts, data.train_batch_size),
                    n=count,
                    prompt=data.max_prompt_length,
                    response=data.max_response_length,
                    sequences=role.limits.max_sequences,
                )
                found += [blocks for blocks in worst_mixes(room) if blocks not in found]
        return found

    def _of_blocks(self, prompts: list[Prompt], blocks: list[Block]) -> tuple[list[Prompt], list[Sample]]:
        shorter = [
            replace(prompt, token_ids=prompt.token_ids[: block.prompt])
            for prompt, block in zip(prompts, blocks, strict=False)
        ]
        return shorter, [
            _longest(group, i, block.response) for group, block in enumerate(blocks) for i in range(block.samples)
        ]

    def _two_micro_batches(self, samples: list[Sample]) -> list[Sample]:
        """Those of the two fullest micro-batches of every role: the others need no more, and there may be many."""
        first = [i for i, sample in enumerate(samples) if sample.group < self.schedule.mini_batch_prompts]
        prompts = [self.config.data.max_prompt_length] * self.config.data.train_batch_size
        lengths, groups = [len(sample.token_ids) for sample in samples], [sample.group for sample in samples]
        kept: set[int] = set()
        for role in (self.actor, self.critic, self.reference):
            if role is not None:
                passes = [
                    [i for block in blocks for i in block.samples]
                    for blocks in pack(prompts, groups, lengths, first, role.limits)
                ]
                kept.update(i for members in sorted(passes, key=len)[-2:] for i in members)
        return [samples[i] for i in sorted(kept)]

    def _prompts(self, step: int) -> list[Prompt]:
        generator = torch.Generator().manual_seed(step)
        size, vocabulary = self.config.data.max_prompt_length, self._architecture.get_text_config().vocab_size
        return [
            Prompt(
                id=i,
                token_ids=tuple(torch.randint(FIRST_ID, vocabulary, (size,), generator=generator).tolist()),
                prompt="",
                target=None,
                source="rehearsal",
                extra={},
            )
            for i in range(self.config.data.train_batch_size)
        ]

    @property
    def _supervised(self) -> bool:
        return self.config.algorithm.name == SUPERVISED

    # --- models ---

    def _actor_model(self, config: Config, target: Target) -> LanguageModel:
        model = self._random(self._architecture, config.actor_rollout_ref.model.quantization)
        if self._stop_ids is not None:
            model = replace(model, stop_ids=self._stop_ids)
        rank = config.actor_rollout_ref.model.lora_rank
        return model.adapted("actor", fresh_adapter(config, model, "actor", rank)) if rank else model

    def _reference_model(self, config: Config, target: Target) -> LanguageModel:
        del config, target
        return self._random(self._architecture, None)

    def _value_model(self, path: str, target: Target, **options: Any) -> ValueModel:  # noqa: ANN401 -- the loader's
        del path, target
        model = self._random(self._critic_architecture, options["quantization"])
        trunk = model.module.base_model
        assert isinstance(trunk, PreTrainedModel), "of a model that is one"
        return add_value_head(
            Trunk(module=trunk, target=self.target, dtype=model.dtype, quantization=model.quantization)
        )

    def _random(self, architecture: PretrainedConfig, quantization: Any) -> LanguageModel:  # noqa: ANN401
        wanted = self.config.actor_rollout_ref.model.dtype
        dtype = self.target.default_dtype if wanted == "auto" else DTYPES[wanted]
        return random_model(architecture, self.target, dtype=dtype, quantization=quantization)

    def _engine(self, model: LanguageModel, capture: Capturing | None) -> Engine | None:
        if self._supervised:
            return None
        return make_engine(
            self.config,
            model,
            prompt_tokens=self.config.data.max_prompt_length,
            samples=self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n,
            n=self.config.actor_rollout_ref.rollout.n,
            lent=self.actor.optimizer.lendable,
            capture=capture,
        )
