"""`ActorRolloutRef`: the policy with its sampler and its reference, without a run around it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ullage.algorithms import Algorithm
from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.base.errors import ConfigError, DataError, UsageError
from ullage.base.seeds import derive
from ullage.batch.stages import Experience, TrainBatch
from ullage.compat.alone import require_alone, schedule_for
from ullage.compat.experience import ExperienceBatch
from ullage.compat.given import Given, Settings, read
from ullage.config.check import is_rewarded
from ullage.data.chat import tokenise
from ullage.data.prompts import Prompt
from ullage.engine.optimizer import learning_rate
from ullage.rollout.sampling import Sampling
from ullage.run.roles import make_actor, make_reference, open_model
from ullage.run.supply import make_engine, make_generator, open_panel
from ullage.run.surroundings import without_a_run
from ullage.telemetry.tally import Tally
from ullage.trainer.collect import to_rollouts, worth
from ullage.trainer.generate import TRAINING
from ullage.trainer.schedule import Schedule
from ullage.workers.actor import Actor
from ullage.workers.critic import Critic
from ullage.workers.passes import micro_batches
from ullage.workers.reference import Reference


class StepOptimizer:
    """The optimizer of a role, as torch's users call it. Gradients are summed over ranks and clipped inside `step`."""

    def __init__(self, role: Actor | Critic, rate: float) -> None:
        self._role = role
        self.learning_rate = rate
        self.norms: list[float] = []
        """Gradient norms before clipping, of the steps since somebody last took them."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Gradients are views of one buffer, so they are zeroed whatever `set_to_none` says."""
        del set_to_none
        self._role.optimizer.zero_grad()

    def step(self) -> None:
        """Update the weights with the gradients that `backward` left; non-finite ones are skipped, and counted."""
        norm = self._role.optimizer.step(self.learning_rate, self._role.ranks)
        self.norms.append(norm)
        if not math.isfinite(norm):
            self._role._count_nonfinite(norm)


class Policy:
    """An actor or a reference, by the names of user code."""

    def __init__(self, role: Actor | Reference) -> None:
        self.role = role
        self.model = role.model.module
        """The `transformers` model itself."""

    def compute_log_probs(self, batch: ExperienceBatch) -> Tensor:
        """[N, T] log-probs of the response tokens, 0 elsewhere; gradients flow unless under `torch.no_grad()`."""
        return log_probs(self.role, batch.stage)


class TrainedPolicy(Policy):
    """The actor, with its optimizer."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor)
        self.optimizer = StepOptimizer(actor, actor.config.optim.lr)


class ActorRolloutRef:
    """Samples, scores and learns from prompts that you give it. A run of its own is `ullage.Trainer`'s.

    Reward functions stay in their processes until `close`, or the end of the program.
    """

    def __init__(self, config: Given) -> None:
        tree = read(config).config
        require_alone(tree, tree.actor_rollout_ref.actor.optim)
        self.config = Settings(tree)
        self._tree = tree
        with ExitStack() as closing:
            given = without_a_run(tree, closing)
            tree = given.config
            torch.manual_seed(tree.trainer.seed)
            self.algorithm: Algorithm = compose(tree)
            if "greedy_baseline" in self.algorithm.needs:
                raise ConfigError(
                    "the algorithm compares with greedy answers, which only a run has", "use ullage.Trainer"
                )
            panel = open_panel(given)
            model = open_model(tree, given.target)
            samples = tree.data.train_batch_size * tree.actor_rollout_ref.rollout.n
            engine = make_engine(
                tree,
                model,
                prompt_tokens=tree.data.max_prompt_length,
                samples=samples,
                n=tree.actor_rollout_ref.rollout.n,
            )
            self.generator = make_generator(given, engine, panel, model)
            self.actor = make_actor(tree, model, Solo(), given.recorder.phase, given.replays)
            wanted = tree.actor_rollout_ref.actor.use_kl_loss or "reference" in self.algorithm.needs
            self.reference = make_reference(tree, self.actor, given.recorder.phase, given.replays) if wanted else None
            self.close = weakref.finalize(self, closing.pop_all().close)
            """End the processes of the reward functions."""
        self.num_collected = self.num_updated = 0

    def collect_experience(self, prompts: Sequence[str], targets: Sequence[Any] | None = None) -> ExperienceBatch:
        """Answer each prompt `rollout.n` times and score the answers as the config says; reward functions see
        `targets`. Where nothing scores, the rewards are yours to set."""
        self.num_collected += 1
        step = self.num_collected
        rows = self._rows(prompts, targets or [None] * len(prompts))
        samples, scores, _ = self.generator.run(rows, self._seeds(rows, step), self._sampling(), TRAINING)
        rewards = worth(scores) if is_rewarded(self._tree) else torch.full((len(samples),), math.nan).double()
        valid = torch.tensor([score.total is not None for score in scores], dtype=torch.bool)
        stage = to_rollouts(rows, range(len(rows)), samples).scored(rewards_N=rewards, valid_N=valid)
        plan = self._schedule(len(rows)).plan(stage, step)
        stage = stage.evaluated(
            old_logprobs=self.actor.logprobs(stage, plan),
            ref_logprobs=self.reference.logprobs(stage, plan) if self.reference else None,
            values=None,
        )
        return ExperienceBatch(stage, self.generator.tokenizer, texts=prompts, step=step)

    def compute_log_probs(self, batch: ExperienceBatch) -> Tensor:
        """[N, T] log-probs under the policy of now; gradients flow unless under `torch.no_grad()`."""
        return log_probs(self.actor, batch.stage)

    def update_policy(self, batch: ExperienceBatch) -> dict[str, float]:
        """The updates of one step on this batch, as the config's algorithm, epochs and mini-batches say."""
        optim = self._tree.actor_rollout_ref.actor.optim
        rate = learning_rate(optim, self.num_updated, self._tree.trainer.total_training_steps or 1)
        stage = credited(batch, self.algorithm)
        tally = Tally()
        for mini_batch in self._schedule(len(stage.prompts)).mini_batches(stage, batch.step):
            self.actor.update(mini_batch, self.algorithm, rate, tally)
        self.num_updated += 1
        return tally.means(Solo()) | {"actor/learning_rate": rate}

    def _rows(self, prompts: Sequence[str], targets: Sequence[Any]) -> list[Prompt]:
        if not prompts or len(targets) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts and {len(targets)} targets", "give one target for each prompt")
        data = self._tree.data
        places = [f"prompt {number}" for number in range(len(prompts))]
        token_ids = tokenise(list(prompts), data, self.generator.tokenizer, places=places)
        for place, ids in zip(places, token_ids, strict=True):
            if not 0 < len(ids) <= data.max_prompt_length:
                raise DataError(
                    f"{place} has {len(ids)} tokens, data.max_prompt_length is {data.max_prompt_length}",
                    "shorten the prompt, or raise data.max_prompt_length",
                )
        together = zip(token_ids, prompts, targets, strict=True)
        return [
            Prompt(id=number, token_ids=ids, prompt=text, target=target, source="prompts", extra={})
            for number, (ids, text, target) in enumerate(together)
        ]

    def _seeds(self, rows: Sequence[Prompt], step: int) -> list[list[int]]:
        seed, count = self._tree.trainer.seed, self._tree.actor_rollout_ref.rollout.n
        return [[derive(seed, step, row.id, index, 0, 0) for index in range(count)] for row in rows]

    def _sampling(self) -> Sampling:
        rollout = self._tree.actor_rollout_ref.rollout
        return Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=self._tree.data.max_response_length,
            ignore_eos=rollout.ignore_eos,
            keep_supports=True,
        )

    def _schedule(self, num_prompts: int) -> Schedule:
        return schedule_for(self._tree, num_prompts, self.algorithm.aggregation)


def log_probs(role: Actor | Reference, stage: Experience) -> Tensor:
    """[N, T] by the packed passes of the update, with their graph where gradients are on."""
    width = stage.mask_NT.shape[1]
    rows: list[Tensor] = []
    parts: list[Tensor] = []
    for packed, _ in micro_batches(stage, role.model, role.limits_for(stage)):
        values, _ = role.model.logprobs(packed, temperature=role.temperature)
        rows.append(packed.samples)
        parts.append(packed.scatter(values, width).to("cpu"))
    dtype = torch.promote_types(role.model.dtype, torch.float32)
    empty = torch.zeros(stage.mask_NT.shape, dtype=dtype)
    return empty.index_put((torch.cat(rows),), torch.cat(parts).to(dtype)) if parts else empty


def credited(batch: ExperienceBatch, algorithm: Algorithm) -> TrainBatch:
    """The batch with advantages: those it has, or those that the algorithm assigns, which it keeps."""
    if not isinstance(batch.stage, TrainBatch):
        batch.require_rewards()
        if "critic" in algorithm.needs and batch.values is None:
            raise DataError(
                "the batch has no values, which this algorithm needs", "set batch.values = critic.compute_values(batch)"
            )
        batch.stage = algorithm.assign_credit(batch.stage, Solo())
    return batch.stage
