"""`Critic`: values of response tokens and the update that learns them, without a run around it."""

from __future__ import annotations

import torch
from torch import Tensor

from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.base.errors import ConfigError, DataError
from ullage.batch.pack import Limits
from ullage.compat.alone import require_alone, schedule_for
from ullage.compat.experience import ExperienceBatch
from ullage.compat.given import Given, Settings, read
from ullage.compat.policy import ActorRolloutRef, StepOptimizer, credited
from ullage.config.settle import plainly
from ullage.config.tree import Config
from ullage.engine.optimizer import learning_rate
from ullage.model.target import find_target
from ullage.model.value_model import ValueModel, load_value_model, share_trunk
from ullage.run.levers import prepare_layers
from ullage.run.roles import make_limits, open_value_model
from ullage.telemetry.tally import Tally
from ullage.workers import critic as workers


class RunningCritic:
    """The critic of a run, by the names of user code."""

    def __init__(self, role: workers.Critic) -> None:
        self.role = role
        self.optimizer = StepOptimizer(role, role.config.optim.lr)

    def compute_values(self, batch: ExperienceBatch) -> Tensor:
        """[N, T] the value before each response token, 0 elsewhere; no gradient."""
        return self.role.values(batch.stage, [torch.arange(len(batch))])


class Critic(RunningCritic):
    """A value for every token (not one for every sequence: then there would be nothing to bootstrap from).

    Without an actor it is a model of its own. A head on the actor's hidden states (critic.share_actor) and adapters
    (critic.model.lora_rank) need the actor: `Critic(config, actor)`.
    """

    def __init__(self, config: Given, actor: ActorRolloutRef | None = None) -> None:
        tree = read(config).config
        tree = plainly(tree, find_target(tree.trainer.device, 0).kind)
        require_alone(tree, tree.critic.optim)
        self.config = Settings(tree)
        self._tree = tree
        self._algorithm = compose(tree)
        model = _model(tree, actor)
        limits = make_limits(tree)
        tokens = tree.critic.ppo_max_token_len_per_gpu
        if tokens != "auto":
            limits = Limits(max_tokens=tokens, share_prefix=limits.share_prefix)
        budget = tree.actor_rollout_ref.actor.max_nonfinite_steps
        super().__init__(workers.Critic(model, tree.critic, limits, Solo(), max_nonfinite_steps=budget))
        self.num_updated = 0

    def update(self, batch: ExperienceBatch) -> dict[str, float]:
        """The updates of one step towards `batch.returns`; where there are none yet, the algorithm's credit gives them.

        Old values are those in `batch.values`, or the present ones.
        """
        if batch.values is None:
            batch.values = self.compute_values(batch)
        stage = credited(batch, self._algorithm)
        if stage.returns_NT is None:
            raise DataError(
                "the batch has no returns, which a critic learns from", "set batch.returns, or use algorithm=ppo"
            )
        rate = learning_rate(self._tree.critic.optim, self.num_updated, self._tree.trainer.total_training_steps or 1)
        tally = Tally()
        for mini_batch in schedule_for(self._tree, len(stage.prompts), self._algorithm.aggregation).mini_batches(
            stage, batch.step
        ):
            self.role.update(mini_batch, rate, tally)
        self.num_updated += 1
        return tally.means(Solo())


def _model(tree: Config, actor: ActorRolloutRef | None) -> ValueModel:
    if actor is not None:
        return share_trunk(actor.actor.model) if tree.critic.share_actor else open_value_model(tree, actor.actor.model)
    for key, wanted in (
        ("critic.share_actor", tree.critic.share_actor),
        ("critic.model.lora_rank", tree.critic.model.lora_rank),
    ):
        if wanted:
            raise ConfigError(f"{key} = {wanted}: there is no actor to build on", "give it: Critic(config, actor)")
    target = find_target(tree.trainer.device, 0)
    path = tree.critic.model.path or tree.actor_rollout_ref.model.path
    model = load_value_model(path, target, dtype=tree.actor_rollout_ref.model.dtype)
    prepare_layers(model.trunk, tree)
    return model
