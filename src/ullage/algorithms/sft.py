"""Supervised fine-tuning: the log-likelihood of given completions, on the engine that reinforcement learning uses."""

from __future__ import annotations

import torch
from torch import Tensor

from ullage.algorithms import TokenLoss, WholeAlgorithm
from ullage.base.communicator import Communicator
from ullage.batch.stages import Experience, TrainBatch


class Algorithm(WholeAlgorithm):
    """Every token of a completion counts alike; nothing is sampled or scored."""

    needs = frozenset({"completions"})

    def assign_credit(self, experience: Experience, ranks: Communicator) -> TrainBatch:
        del ranks
        return experience.credited(advantages_NT=experience.mask_NT.to(torch.float64))

    def policy_loss(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        del old_logprobs_NT, batch
        return TokenLoss(-logprobs_NT, {})
