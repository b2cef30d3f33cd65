"""Puts an algorithm together from its file and from what the config replaces; adds what every algorithm shares."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from torch import Tensor

from ullage.algorithms import Algorithm, Credit, PolicyLoss, TokenLoss
from ullage.base import extensions
from ullage.base.communicator import Communicator
from ullage.base.errors import ConfigError
from ullage.batch.stages import Experience, TrainBatch
from ullage.config.tree import Config
from ullage.config.verl_keys import ALGORITHM_NAMES
from ullage.maths import advantages_token, kl, masked

KINDS = {"Credit": "advantage estimator", "Loss": "policy loss"}
REPLACED_BY = {"Credit": "algorithm.adv_estimator", "Loss": "actor_rollout_ref.actor.policy_loss.loss_mode"}
"""The keys that name another file for a part."""


class Composed:
    """Credit and loss of possibly different files, with the KL penalty in the reward where it is on."""

    def __init__(self, config: Config, credit: Credit, loss: PolicyLoss, aggregation: str, *, refills: bool) -> None:
        self.credit = credit
        self.loss = loss
        self.aggregation = aggregation
        self.refills = refills
        self.penalty = KLPenalty(config) if config.algorithm.use_kl_in_reward else None
        self.needs = credit.needs | ({"reference", "old_logprobs"} if self.penalty else set())

    def has_signal(self, experience: Experience) -> Tensor:
        everyone = self.penalty is not None or self.selects  # both look at samples whose advantage is 0
        return experience.valid_N if everyone else self.credit.has_signal(experience)

    def assign_credit(self, experience: Experience, ranks: Communicator) -> TrainBatch:
        rewards_NT = advantages_token.at_last_token(experience.rewards_N, experience.mask_NT)
        if self.penalty:
            rewards_NT = self.penalty.apply(rewards_NT, experience, ranks)
        advantages, returns = self.credit.assign(experience, rewards_NT, ranks)
        return experience.credited(advantages_NT=advantages, returns_NT=returns)

    @property
    def selects(self) -> bool:
        """Whether the loss singles out tokens by statistics of the whole mini-batch."""
        return hasattr(self.loss, "select")

    def prepare(self, batch: TrainBatch, logprobs_NT: Tensor, ranks: Communicator, seed: int) -> TrainBatch:
        loss: Any = self.loss
        return batch.selecting(loss.select(logprobs_NT, batch, ranks, seed))

    def policy_loss(self, logprobs_NT: Tensor, old_logprobs_NT: Tensor, batch: TrainBatch) -> TokenLoss:
        token_loss = self.loss(logprobs_NT, old_logprobs_NT, batch)
        report = token_loss.report_NT | {"actor/kl_old": old_logprobs_NT - logprobs_NT}
        return dataclasses.replace(token_loss, report_NT=report)

    def state(self) -> dict[str, float]:
        """What a checkpoint must remember."""
        return {"kl_coefficient": self.penalty.coefficient} if self.penalty else {}

    def restore(self, state: dict[str, float]) -> None:
        if self.penalty:
            self.penalty.coefficient = state.get("kl_coefficient", self.penalty.coefficient)


class KLPenalty:
    """KL to the reference, taken from the reward of each token; its coefficient fixed or steered to a target."""

    def __init__(self, config: Config) -> None:
        control = config.algorithm.kl_ctrl
        self.estimator = kl.ESTIMATORS[config.algorithm.kl_penalty]
        self.adaptive = control.type == "adaptive"
        self.target, self.horizon = control.target_kl, control.horizon
        self.coefficient = control.kl_coef

    def apply(self, rewards_NT: Tensor, experience: Experience, ranks: Communicator) -> Tensor:
        old, reference, mask = experience.old_logprobs_NT, experience.ref_logprobs_NT, experience.mask_NT
        assert old is not None, "a run with KL in the reward computes them"
        assert reference is not None, "a run with KL in the reward has one"
        kl_NT = self.estimator(old, reference)
        penalised = kl.penalised_rewards(rewards_NT, kl_NT.to(rewards_NT.dtype), mask, self.coefficient)
        if self.adaptive:
            per_sequence = masked.row_mean(kl_NT, mask)
            total, count = ranks.sum([float(per_sequence.sum()), float(len(per_sequence))])
            mean = total / max(count, 1.0)
            self.coefficient = kl.new_coefficient(self.coefficient, mean, self.target, self.horizon, int(count))
        return penalised


def name_of(config: Config) -> str:
    """The algorithm's name: what the config says, or verl's `adv_estimator` alone, or grpo."""
    name = config.algorithm.name or config.algorithm.adv_estimator or "grpo"
    return ALGORITHM_NAMES.get(name, name)


def compose(config: Config) -> Algorithm:
    """The algorithm of a config; mixes that make no sense are refused with the reason."""
    name = name_of(config)
    module = extensions.find("algorithms", name)
    actor = config.actor_rollout_ref.actor
    if hasattr(module, "Algorithm"):
        return _whole(module, name, config)
    credit = _part(module, name, "Credit", config.algorithm.adv_estimator)
    loss = _part(module, name, "Loss", actor.policy_loss.loss_mode)
    own = getattr(loss, "AGGREGATION", None) or getattr(module, "AGGREGATION", None) or "token-mean"
    if getattr(loss, "ONLY_AGGREGATION", False) and actor.loss_agg_mode not in (None, own):
        raise ConfigError(
            f"actor_rollout_ref.actor.loss_agg_mode = {actor.loss_agg_mode}: this loss is defined per sequence",
            f"set it to {own}, or leave it out",
        )
    refills = config.algorithm.filter_groups.enable
    return Composed(
        config,
        credit.Credit(config),
        loss.Loss(config),
        actor.loss_agg_mode or own,
        refills=getattr(module, "REFILLS", False) if refills is None else refills,
    )


def _whole(module: ModuleType, name: str, config: Config) -> Algorithm:
    """An algorithm written as one class, which has no parts that a config could replace."""
    given = {
        "Credit": config.algorithm.adv_estimator,
        "Loss": config.actor_rollout_ref.actor.policy_loss.loss_mode,
    }
    for kind, value in given.items():
        if value is not None:
            key = REPLACED_BY[kind]
            raise ConfigError(f"{key} = {value}: {name} is one class, its {KINDS[kind]} is fixed", f"leave {key} out")
    if config.algorithm.use_kl_in_reward:
        raise ConfigError(
            f"algorithm.use_kl_in_reward = true: {name} is one class and assigns its own credit",
            "take the penalty from the reward there, or set actor_rollout_ref.actor.use_kl_loss=true",
        )
    if missing := sorted(getattr(module.Algorithm, "__abstractmethods__", ())):
        raise ConfigError(f"{name}: class Algorithm has no {' and no '.join(missing)}", "define what is missing")
    whole: Algorithm = module.Algorithm(config)
    return whole


def _part(module: ModuleType, name: str, kind: str, replaced_by: str | None) -> ModuleType:
    """The file that holds the algorithm's credit or loss: its own, the one it names, or the one the config names."""
    if replaced_by is not None:
        chosen = ALGORITHM_NAMES.get(replaced_by, replaced_by)
        found = module if chosen == name else extensions.find("algorithms", chosen)
        if not hasattr(found, kind):
            key = REPLACED_BY[kind]
            raise ConfigError(
                f"{key} = {replaced_by}: {chosen} has no {KINDS[kind]} of its own",
                f"leave {key} out; algorithm={chosen} is the whole of it",
            )
        return found
    if hasattr(module, kind):
        return module
    if not hasattr(module, kind.upper()):
        raise ConfigError(
            f"{name} has no {KINDS[kind]}: neither a class {kind} nor {kind.upper()}, the name of a file with one",
            f"add one of them, or set {REPLACED_BY[kind]}",
        )
    return extensions.find("algorithms", getattr(module, kind.upper()))
