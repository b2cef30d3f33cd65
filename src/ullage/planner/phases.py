"""What is alive in each phase of a step: the peak of a run is the largest of these sums, never the sum of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ullage.base.errors import ModelError
from ullage.config.check import SUPERVISED
from ullage.config.settle import PASS_TOKENS, choices_of, plainly
from ullage.config.tree import Config, Optim
from ullage.planner import components as c
from ullage.planner.components import Pass, Term
from ullage.planner.model_shape import Shape, find_shape

ADAPTER_RANK = 16
"""Assumed of an adapter that is read from a folder."""
CRITIC_METHODS = ("ppo", "gae")
"""Algorithms and estimators that cannot do without a critic."""
WIDTHS = {"auto": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a weight; auto is half precision on a GPU."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase and everything that is on the device at its peak."""

    name: str
    terms: tuple[Term, ...]

    @property
    def components(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for term in self.terms:
            found[term.name] = found.get(term.name, 0) + term.bytes
        return {name: count for name, count in found.items() if count}

    @property
    def total_bytes(self) -> int:
        return sum(term.bytes for term in self.terms)

    @property
    def allocated_bytes(self) -> int:
        """What torch's allocator holds of it: the peak that a run measures."""
        return sum(term.bytes for term in self.terms if term.name not in ("context", "slack"))


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
    def largest(self) -> int:
        """Elements of its largest parameter."""
        if self.rank:
            return self.rank * max(self.shape.mlp, self.shape.hidden)
        experts = self.shape.experts * 2 * self.shape.expert_mlp * self.shape.hidden
        return max(self.shape.table, experts)


class Layout:
    """A run's numbers, worked out from its config once; phases are built from them."""

    def __init__(self, shape: Shape, config: Config, *, ranks: int = 1) -> None:
        config = plainly(config, "cuda")
        self.shape, self.config, self.ranks = shape, config, ranks
        self.chosen = choices_of(config)
        self.assumptions = [shape.assumption] if shape.assumption else []
        model = config.actor_rollout_ref.model
        self.width = WIDTHS[model.dtype]
        self.quantisation: c.Quantisation | None = model.quantization
        self.longest = config.data.max_prompt_length + config.data.max_response_length
        # An adapter's own rank is in its folder, which need not be here.
        rank = model.lora_rank or (ADAPTER_RANK if model.lora_adapter_path else 0)
        self.actor = Trained(
            shape=shape,
            optim=config.actor_rollout_ref.actor.optim,
            rank=rank,
            targets=tuple(model.target_modules),
            trains_head=not rank,
            has_head=True,
        )
        self.supervised = config.algorithm.name == SUPERVISED
        self.critic = self._find_critic()
        self.reference = not rank and (config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward)
        self.reward_model = self._other(config.reward_model.model.path) if config.reward_model.enable else None
        self.parked = self.chosen.offload_roles
        self._assume()

    # --- passes ---

    @property
    def update_pass(self) -> Pass:
        """The fullest micro-batch that sequences of full length make under the token limit."""
        return self._pass(self.chosen.tokens, self.actor.rank)

    def _pass(self, limit: int, rank: int) -> Pass:
        """Whole groups as long as they fit (a prompt is fed once for its samples), then part of one more."""
        config, actor = self.config, self.config.actor_rollout_ref.actor
        prompt, response = config.data.max_prompt_length, config.data.max_response_length
        n = 1 if self.supervised else config.actor_rollout_ref.rollout.n
        prompts = -(-(actor.ppo_mini_batch_size or config.data.train_batch_size) // self.ranks)
        groups, room = divmod(limit, prompt + n * (response - 1))
        more = max(0, room - prompt) // max(1, response - 1)
        samples = max(1, min(groups * n + more, prompts * n, actor.ppo_micro_batch_size_per_gpu or prompts * n))
        return Pass(
            tokens=-(-samples // n) * prompt + samples * (response - 1),
            positions=samples * response,
            width=self.width,
            compiled=config.memory.compile,
            rank=rank,
        )

    @property
    def prefill_pass(self) -> Pass:
        prompt = self.config.data.max_prompt_length
        admitted = -(-self.slots // self.config.actor_rollout_ref.rollout.n)
        tokens = min(max(c.PREFILL_TOKENS // prompt, 1), admitted) * prompt
        return Pass(tokens=tokens, positions=0, width=self.width, rank=self.actor.rank)

    @property
    def slots(self) -> int:
        samples = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        return min(self.chosen.slots, -(-samples // self.ranks))

    @property
    def recomputed(self) -> int:
        """Layers that run again in the backward pass."""
        return round(self.chosen.recomputed_share * self.shape.layers)

    @property
    def leaving(self) -> int:
        """Layers whose activations wait on the host (run/levers.py)."""
        chosen, layers = self.chosen, self.shape.layers
        if chosen.activation_offload == "none":
            return 0
        groups = self.config.memory.activation_groups or layers
        return min(round(chosen.activation_share * groups), groups - 1) * layers // groups

    # --- what stays ---

    def resident(self) -> list[Term]:
        """On the device from the first phase to the last."""
        terms = [c.weights(self.shape, width=self.width, quantisation=self.quantisation), *self._owned(self.actor)]
        if self.critic is not None:
            terms += self._owned(self.critic)
            if not self.parked:
                terms += self._critic_weights()
        if self.reference and not self.parked:
            terms.append(self._reference_weights())
        if self.reward_model is not None and not self.parked:
            terms.append(self._reward_weights(self.reward_model))
        if not self.supervised:
            terms.append(self.kv_cache())
        return terms

    def kv_cache(self) -> Term:
        rollout, chosen = self.config.actor_rollout_ref.rollout, self.chosen
        each = 4 if chosen.gradients == "float32" else self.width
        return c.kv_cache(
            self.shape,
            slots=self.slots,
            longest=self.longest,
            tokens=None if rollout.kv_cache_tokens == "auto" else rollout.kv_cache_tokens,
            width=self.width,
            lent=0 if chosen.gradients == "host" else each * self.actor.parameters,
        )

    def _owned(self, role: Trained) -> Iterator[Term]:
        """Adapters, gradients, state and master of a role; these never park."""
        chosen, count = self.chosen, role.parameters
        if role.rank:
            yield c.adapters(count, role.rank, width=self.width)
        if chosen.gradients != "host":
            yield replace(c.gradients(count, chosen.gradients, width=self.width), inputs={"P": count})
        if chosen.optimizer_state == "device":
            yield c.moments(count, role.optim.optimizer)
            if self.has_master:
                yield c.master(count)
        staged = self._staged_bytes(role.optim)
        if staged:
            yield c.staging(staged, role.largest)

    @property
    def has_master(self) -> bool:
        return self.chosen.optimizer_state == "host" or (self.width == 2 and self.config.memory.rounding == "master")

    def _staged_bytes(self, optim: Optim) -> float:
        """For an element, what comes from the host to be stepped on the device."""
        chosen = self.chosen
        if chosen.optimizer_state == "host":
            return 0.0
        state = c.moment_bytes(optim.optimizer) + (4 if self.has_master else 0)
        return (state if chosen.optimizer_state == "streamed" else 0.0) + (
            self.width if chosen.gradients == "host" else 0
        )

    # --- phases ---

    def phases(self) -> list[Phase]:
        stays = self.resident()
        found = [Phase("load", (c.weights(self.shape, width=self.width, quantisation=self.quantisation), c.context()))]

        def phase(name: str, *terms: Term, backward: bool = False) -> None:
            around = (c.buffers(backward=backward, ranks=self.ranks), c.context())
            found.append(Phase(name, (*stays, *terms, *around)))

        if not self.supervised:
            phase("rollout", *self._rollout())
        if self.reward_model is not None:
            here = [self._reward_weights(self.reward_model)] if self.parked else []
            tokens = max(PASS_TOKENS, 2 * self.longest)
            phase("reward_model", *here, c.forward_layer(self.reward_model, Pass(tokens=tokens, positions=0)))
        if not self.supervised:
            phase("logprob", *self._forward(self.update_pass))
        if self.reference:
            phase("reference", *([self._reference_weights()] if self.parked else []), *self._forward(self._ref_pass))
        if self.critic is not None:
            here = self._critic_weights() if self.parked else []
            phase("values", *here, c.forward_layer(self.critic.shape, self._critic_pass))
            phase("update_critic", *here, *self.backward(self.critic, self._critic_pass), backward=True)
        phase("update", *self.backward(self.actor, self.update_pass), backward=True)
        rounded = self.width == 2 and not self.has_master
        phase("optimizer_step", c.step_transient(self.actor.optim.optimizer, rounded=rounded), backward=True)
        phase("save", backward=True)
        return found

    def backward(self, role: Trained, a: Pass) -> list[Term]:
        """The worst moment of a forward and backward pass: at the head, in a layer, or at the embedding."""
        shape = role.shape
        matmuls = self.chosen.recompute == "matmuls"
        recomputed, leaving = min(self.recomputed, shape.layers), min(self.leaving, shape.layers - 1)
        kept = c.activations(shape, a, recomputed=recomputed, matmuls=matmuls, leaving=leaving)
        each = c.kept_by_recompute(shape, a, matmuls=matmuls) if recomputed else c.saved_by_layer(shape, a)
        head = c.head_backward(shape, a, trained=role.trains_head) if role.has_head else c.value_head(shape, a)
        layer = c.working_layer(shape, a, recomputed=recomputed > 0, arriving=2 * each if leaving else 0)
        in_layer = [kept, layer]
        if self.quantisation and role.rank:
            in_layer.append(c.dequantised(shape, width=self.width))
        moments = [[kept, head], in_layer]
        if shape.tied and role.trains_head:
            waiting = c.waiting_table(shape, width=self.width)
            in_layer.append(replace(waiting, bytes=waiting.bytes // 2, formula="2 B x V h, the head's gradient waits"))
            moments.append([waiting])
        if self.chosen.gradients != "weights" and not role.rank:  # at the head it is part of the head's own
            in_layer.append(c.gradients(0, self.chosen.gradients, width=self.width, largest=role.largest))
        return max(moments, key=lambda terms: sum(term.bytes for term in terms))

    def _rollout(self) -> list[Term]:
        rollout = self.config.actor_rollout_ref.rollout
        prefill = c.forward_layer(self.shape, self.prefill_pass)
        truncated = rollout.top_p < 1 or rollout.top_k > 0
        drawing = c.sampling(self.shape, slots=self.slots, truncated=truncated)
        return [max(prefill, drawing, key=lambda term: term.bytes), *self._plain_layer()]

    def _forward(self, a: Pass) -> list[Term]:
        layer, head = c.forward_layer(self.shape, a), c.head_forward(self.shape, a)
        return [max(layer, head, key=lambda term: term.bytes), *self._plain_layer()]

    def _plain_layer(self) -> list[Term]:
        return [c.dequantised(self.shape, width=self.width)] if self.quantisation else []

    @property
    def _ref_pass(self) -> Pass:
        limit = self.config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
        return self.update_pass if limit == "auto" else self._pass(limit, 0)

    @property
    def _critic_pass(self) -> Pass:
        limit, rank = self.config.critic.ppo_max_token_len_per_gpu, self.config.critic.model.lora_rank
        return replace(self.update_pass, rank=rank) if limit == "auto" else self._pass(limit, rank)

    # --- other roles ---

    def _find_critic(self) -> Trained | None:
        config, wanted = self.config, self.config.critic
        method = config.algorithm.adv_estimator or config.algorithm.name
        needed = wanted.enable if wanted.enable is not None else method in CRITIC_METHODS
        if not needed or wanted.share_actor:  # a row of numbers on the actor's own hidden states
            return None
        shape = self._other(wanted.model.path) if wanted.model.path else self.shape
        own = not (wanted.model.lora_rank and self.actor.rank and not wanted.model.path)
        return Trained(
            shape=shape,
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
            return find_shape(path)
        except ModelError:
            self.assumptions.append(f"{path or 'the reward model'}: taken to have the actor's shape")
            return self.shape

    def _critic_weights(self) -> list[Term]:
        if self.critic is None or not self.critic.owns_weights:
            return []
        quantisation = self.quantisation if self.critic.rank else None
        return [c.weights(self.critic.shape, width=self.width, quantisation=quantisation, head=False)]

    def _reference_weights(self) -> Term:
        return c.weights(self.shape, width=self.width)

    def _reward_weights(self, shape: Shape) -> Term:
        return c.weights(shape, width=self.width, head=False)

    # --- host and disk ---

    def host(self) -> dict[str, int]:
        """Bytes of host memory of one rank, by what holds them."""
        chosen = self.chosen
        found = {"process": c.PROCESS, "optimizer": 0, "gradients": 0, "activations": 0, "roles": 0, "checkpoint": 0}
        for role in (self.actor, *([self.critic] if self.critic else [])):
            count, piece = role.parameters, min(c.PIECE, role.largest)
            state = self._state_bytes(role)
            if chosen.optimizer_state != "device":
                found["optimizer"] += state
            if chosen.optimizer_state == "host":
                found["optimizer"] += 2 * piece * 2 * self.width + 4 * piece
            if chosen.gradients == "host":
                found["gradients"] += self.width * (count + c.COURIER_STAGES * piece)
            # A file is written from host memory: what is on the device comes there, one file at a time.
            copied = max(state if chosen.optimizer_state == "device" else 0, self.width * count)
            found["checkpoint"] = max(found["checkpoint"], copied)
        if self.leaving:
            a = self.update_pass
            away = c.activations(
                self.shape, a, recomputed=self.recomputed, matmuls=chosen.recompute == "matmuls", leaving=0
            ).bytes
            found["activations"] = -(-away * self.leaving // self.shape.layers // c.SLAB) * c.SLAB
        if self.parked:
            roles = [*self._critic_weights(), *([self._reference_weights()] if self.reference else [])]
            roles += [self._reward_weights(self.reward_model)] if self.reward_model else []
            found["roles"] = sum(term.bytes for term in roles)
        return found

    def disk(self) -> dict[str, int]:
        """Bytes of one checkpoint, of those that are kept while the next is written, and of the final folder."""
        roles = [self.actor, *([self.critic] if self.critic else [])]
        written = sum(self.width * role.parameters + self._state_bytes(role) for role in roles)
        kept = self.config.trainer.max_ckpt_to_keep + 2  # the best one, and the one being written
        return {"checkpoint": written, "kept": kept * written, "final": self.width * self.actor.parameters}

    def _state_bytes(self, role: Trained) -> int:
        state = c.moments(role.parameters, role.optim.optimizer).bytes
        return state + (4 * role.parameters if self.has_master else 0)

    def _assume(self) -> None:
        shape = self.shape
        said: list[tuple[bool, str]] = [
            (True, "every prompt and response has its full length"),
            (
                self.actor.rank != self.config.actor_rollout_ref.model.lora_rank,
                f"the adapter that training starts from has rank {ADAPTER_RANK}",
            ),
            (self.ranks > 1, "every GPU holds a whole replica; NCCL takes 650 MiB"),
            (shape.experts > 0, "experts are balanced; their activations are by formula, not measured"),
            (shape.kv_lora_rank > 0, "the cache holds whole keys and values, not the compressed form"),
            (self.width != 2, "activations beside half precision are scaled by width, not measured"),
        ]
        self.assumptions += [text for holds, text in said if holds]


def phases(shape: Shape, config: Config, *, ranks: int = 1) -> list[Phase]:
    """All phases of a step, in their order."""
    return Layout(shape, config, ranks=ranks).phases()
