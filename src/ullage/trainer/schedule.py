"""Mini-batches of a step: which prompts, in which order, with which loss denominators.

A mini-batch is a range of the step's global prompt order, so it holds the same prompts whatever the number of ranks.
Its denominators are counted over all of it and all ranks; samples without signal are counted, then left out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.base.seeds import derive
from ullage.batch.stages import Experience, TrainBatch
from ullage.config.tree import Config
from ullage.maths import aggregate


class Schedule:
    """How a step's experience is consumed."""

    def __init__(self, config: Config, aggregation: str, ranks: Communicator) -> None:
        actor = config.actor_rollout_ref.actor
        self.ranks = ranks
        self.num_prompts = config.data.train_batch_size
        self.mini_batch_prompts = actor.ppo_mini_batch_size or self.num_prompts
        self.epochs = actor.ppo_epochs
        self.shuffle = actor.shuffle
        self.mode = aggregation
        self.value_mode = config.critic.loss_agg_mode or aggregation
        self.scale = actor.loss_scale_factor or float(config.data.max_response_length)
        self.seed = config.trainer.seed

    @property
    def off_policy(self) -> bool:
        """Whether any update of a step uses weights that did not sample its experience."""
        return self.epochs > 1 or self.mini_batch_prompts < self.num_prompts

    def plan(self, experience: Experience, step: int) -> list[Tensor]:
        """The samples with signal of each mini-batch of the first epoch, as the update will see them."""
        members = self._members(experience, step, epoch=0)
        return [part[experience.signal_N[part]] for part in members]

    def mini_batches(self, batch: TrainBatch, step: int) -> Iterator[TrainBatch]:
        """Mini-batches with token weights, samples with signal only; one without signal on any rank is skipped."""
        for epoch in range(self.epochs):
            for members in self._members(batch, step, epoch):
                mask = batch.mask_NT[members]
                with_signal = members[batch.signal_N[members]]
                tokens, sequences, num_with_signal = self.ranks.sum([*aggregate.count(mask), float(len(with_signal))])
                if num_with_signal:
                    part = batch.select(with_signal)
                    counts = aggregate.Counts(tokens, sequences)
                    yield part.weighted(*(self._weights(part, mode, counts) for mode in (self.mode, self.value_mode)))

    def _weights(self, part: TrainBatch, mode: str, counts: aggregate.Counts) -> Tensor:
        return aggregate.token_weights(part.mask_NT, mode, counts, scale=self.scale, dtype=part.advantages_NT.dtype)

    def _members(self, experience: Experience, step: int, epoch: int) -> list[Tensor]:
        """Sample indices of every mini-batch of one epoch; this rank's share of each."""
        order = list(range(self.num_prompts))
        if self.shuffle:
            random.Random(derive(self.seed, "mini-batches", step, epoch)).shuffle(order)
        place_of = torch.empty(self.num_prompts, dtype=torch.long)
        place_of[torch.tensor(order)] = torch.arange(self.num_prompts)
        mini_batch_N = (place_of[experience.order_G] // self.mini_batch_prompts)[experience.group_N]
        count = -(-self.num_prompts // self.mini_batch_prompts)
        return [(mini_batch_N == k).nonzero()[:, 0] for k in range(count)]
