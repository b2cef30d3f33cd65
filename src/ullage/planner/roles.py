"""The roles of a run as the planner sees them: what each one trains, and what its weights take."""

from __future__ import annotations

from dataclasses import dataclass

from ullage.base.errors import ModelError
from ullage.config.tree import Config, Optim
from ullage.planner import components as c
from ullage.planner.components import Term
from ullage.planner.model_shape import Shape, find_shape
from ullage.planner.sharding import local_shape

ADAPTER_RANK = 16
"""Assumed of an adapter that is read from a folder."""
CRITIC_METHODS = ("ppo", "gae")
"""Algorithms and estimators that cannot do without a critic."""
WIDTHS = {"auto": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a weight; auto is half precision on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A role that is trained: the actor or the critic."""

    shape: Shape
    optim: Optim
    rank: int
    targets: tuple[str, ...]
    """Layers that adapters change."""
    trains_head: bool
    """Its gradient reaches an output head over the vocabulary."""
    has_head: bool
    """It has such a head at all."""
    owns_weights: bool = True
    """False for adapters on another role's weights."""

    @property
    def parameters(self) -> int:
        if self.rank:
            return c.adapter_parameters(self.shape, self.rank, self.targets)
        return self.shape.parameters if self.has_head else self.shape.trunk_parameters + self.shape.hidden + 1

    @property
    def layer_parameters(self) -> int:
        """Of its largest layer, those that are trained."""
        return self.parameters // self.shape.layers if self.rank else self.shape.layer_parameters

    @property
    def largest(self) -> int:
        """Elements of its largest parameter."""
        if self.rank:
            return self.rank * max(self.shape.mlp, self.shape.hidden)
        return max(self.shape.table, self.shape.fused_experts)


class Roles:
    """Who takes part in a run, and what was assumed to find that out."""

    def __init__(self, shape: Shape, config: Config, *, tensor: int = 1) -> None:
        """Shapes are those of one of `tensor` ranks."""
        self.assumptions: list[str] = []
        self._tensor = tensor
        model = config.actor_rollout_ref.model
        self.width = WIDTHS[model.dtype]
        self.quantisation: c.Quantisation | None = model.quantization
        # An adapter's own rank is in its folder, which need not be here.
        rank = model.lora_rank or (ADAPTER_RANK if model.lora_adapter_path else 0)
        if rank != model.lora_rank:
            self.assumptions.append(f"the adapter that training starts from has rank {ADAPTER_RANK}")
        self.actor = Trained(
            shape=local_shape(shape, tensor),
            optim=config.actor_rollout_ref.actor.optim,
            rank=rank,
            targets=tuple(model.target_modules),
            trains_head=not rank,
            has_head=True,
        )
        self.critic = self._find_critic(config)
        self.has_reference = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
        self.reference = self.has_reference and not rank
        self.reward_model = self._other(config.reward_model.model.path) if config.reward_model.enable else None

    @property
    def trained(self) -> list[Trained]:
        return [self.actor, *([self.critic] if self.critic else [])]

    @property
    def critic_quantisation(self) -> c.Quantisation | None:
        return self.quantisation if self.critic is not None and self.critic.rank else None

    def actor_weights(self) -> Term:
        return c.weights(self.actor.shape, width=self.width, quantisation=self.quantisation)

    def critic_weights(self) -> list[Term]:
        if self.critic is None or not self.critic.owns_weights:
            return []
        return [c.weights(self.critic.shape, width=self.width, quantisation=self.critic_quantisation, head=False)]

    def reference_weights(self) -> list[Term]:
        return [c.weights(self.actor.shape, width=self.width)] if self.reference else []

    def reward_weights(self) -> list[Term]:
        return [c.weights(self.reward_model, width=self.width, head=False)] if self.reward_model else []

    def _find_critic(self, config: Config) -> Trained | None:
        wanted = config.critic
        method = config.algorithm.adv_estimator or config.algorithm.name
        needed = wanted.enable if wanted.enable is not None else method in CRITIC_METHODS
        self.shares_critic = needed and wanted.share_actor  # a row of numbers on the actor's own hidden states
        if not needed or wanted.share_actor:
            return None
        own = not (wanted.model.lora_rank and self.actor.rank and not wanted.model.path)
        return Trained(
            shape=self._other(wanted.model.path) if wanted.model.path else self.actor.shape,
            optim=wanted.optim,
            rank=wanted.model.lora_rank,
            targets=tuple(config.actor_rollout_ref.model.target_modules),
            trains_head=False,
            has_head=False,
            owns_weights=own,
        )

    def _other(self, path: str) -> Shape:
        """The shape of another role's model, as far as it can be found out here."""
        try:
            return local_shape(find_shape(path), self._tensor)
        except ModelError:
            self.assumptions.append(f"{path or 'the reward model'}: taken to have the actor's shape")
            return self.actor.shape


def evaluates_old_policy(config: Config) -> bool:
    """Whether steps compute log-probs before they update (trainer/loop.py): one update with samples of an engine that
    reads the trainer's weights is its own old policy."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    prompts = config.data.train_batch_size
    off_policy = actor.ppo_epochs > 1 or (actor.ppo_mini_batch_size or prompts) < prompts
    compares = bool(correction.rollout_rs) or correction.rollout_is not in ("auto", None)
    return not correction.bypass_mode and (off_policy or compares or config.algorithm.use_kl_in_reward)
