"""What is alive in each phase of a step: the peak of a run is the largest of these sums, never the sum of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ullage.config.check import SUPERVISED
from ullage.config.settle import PASS_TOKENS, choices_of, plainly
from ullage.config.tree import Config, Optim
from ullage.planner import components as c
from ullage.planner import drawing, passes, storage
from ullage.planner.components import Pass, Term
from ullage.planner.drawing import Drawing
from ullage.planner.model_shape import Shape
from ullage.planner.passes import Block
from ullage.planner.roles import Roles, Trained
from ullage.planner.sharding import Groups, Sharding, exchanged, local_pass, shared
from ullage.planner.stack import Stack, forward_attention


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
        return total(self.terms)

    @property
    def allocated_bytes(self) -> int:
        """What torch's allocator holds of it: the peak that a run measures."""
        return sum(term.bytes for term in self.terms if term.name not in ("context", "slack", "graphs"))


def total(terms: Iterable[Term]) -> int:
    return sum(term.bytes for term in terms)


class Layout:
    """A run's numbers, worked out from its config once; phases are built from them.

    Without `sharding` every one of the ranks holds a whole replica.
    """

    def __init__(self, shape: Shape, config: Config, *, ranks: int = 1, sharding: Sharding | None = None) -> None:
        config = plainly(config, "cuda")
        if config.memory.liger:  # whose MLP keeps the gated product
            shape = replace(shape, gated=False)
        self.shape, self.config = shape, config
        self.sharding = sharding or Sharding(data=ranks)
        self.ranks = self.sharding.ranks
        self.chosen = choices_of(config)
        self.roles = Roles(shape, config, tensor=self.sharding.tensor)
        self.actor, self.critic = self.roles.actor, self.roles.critic
        self.reference, self.reward_model = self.roles.reference, self.roles.reward_model
        self.width, self.quantisation = self.roles.width, self.roles.quantisation
        self.longest = config.data.max_prompt_length + config.data.max_response_length
        self.supervised = config.algorithm.name == SUPERVISED
        self.parked = self.chosen.offload_roles
        self.assumptions = [*self._assumed()]

    # --- passes ---

    @cached_property
    def update_pass(self) -> Pass:
        """The most that one micro-batch of the actor can hold, whatever the lengths of its sequences."""
        return self._fullest(self.chosen.tokens, self.actor)

    def _fullest(self, limit: int, role: Trained) -> Pass:
        """The worse for a role of the two worst mixes."""
        return max(self._passes(limit, role.rank), key=lambda a: total(self.backward(role, a)))

    def _passes(self, limit: int, rank: int) -> list[Pass]:
        return [self._pass(blocks, rank) for blocks in passes.worst_mixes(self.room(limit))]

    def _pass(self, blocks: list[Block], rank: int) -> Pass:
        whole = Pass(
            tokens=passes.tokens_of(blocks),
            positions=sum(block.samples * block.response for block in blocks),
            width=self.width,
            compiled=self.config.memory.compile,
            rank=rank,
            more_keys=-(-passes.more_keys_of(blocks) // self.sharding.sequence),
        )
        return local_pass(whole, self.sharding.sequence)

    @property
    def fullest_blocks(self) -> list[Block]:
        """What `update_pass` is made of, for one that rehearses it."""
        mixes = passes.worst_mixes(self.room(self.chosen.tokens))
        return next(blocks for blocks in mixes if self._pass(blocks, self.actor.rank) == self.update_pass)

    def room(self, limit: int) -> passes.Room:
        """What a rank's mini-batches are made of."""
        data, actor = self.config.data, self.config.actor_rollout_ref.actor
        return passes.Room(
            tokens=limit,
            groups=-(-(actor.ppo_mini_batch_size or data.train_batch_size) // self.sharding.data),
            n=1 if self.supervised else self.config.actor_rollout_ref.rollout.n,
            prompt=data.max_prompt_length,
            response=data.max_response_length,
            sequences=actor.ppo_micro_batch_size_per_gpu,
        )

    @property
    def full_length_samples(self) -> int:
        """Samples of a micro-batch where all sequences have their full length: a prompt is fed once for its samples."""
        room = self.room(self.chosen.tokens)
        full = [block for block in passes.long_prompts(room) if block.prompt == room.prompt]
        return sum(block.samples for block in full)

    @property
    def rollout(self) -> Drawing:
        return drawing.of_rollout(self)

    @property
    def slots(self) -> int:
        samples = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        return min(self.chosen.slots, -(-samples // self.sharding.data))

    @property
    def eval_slots(self) -> int:
        """Sequences decoded at once in an evaluation: all slots, unless its prompts are few."""
        prompts, n = self.config.data.val_max_samples, self.config.actor_rollout_ref.rollout.val_kwargs.n
        return self.chosen.slots if prompts < 0 else min(self.chosen.slots, -(-prompts * n // self.sharding.data))

    @property
    def recomputed(self) -> int:
        """Layers that run again in the backward pass; compiled ones make again what is cheap in any case."""
        if self.chosen.recompute == "matmuls" and self.config.memory.compile:
            return 0
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

    def part(self, count: int) -> int:
        """What a rank keeps of what is shared out."""
        return -(-count // self.sharding.shards)

    def _shared(self, terms: Iterable[Term]) -> list[Term]:
        return [shared(term, self.sharding.shards) for term in terms]

    def resident(self) -> list[Term]:
        """On the device from the first phase to the last."""
        roles = self.roles
        terms = [roles.actor_weights()]
        for role in roles.trained:
            terms += self._owned(role)
        if not self.parked:
            terms += [*roles.critic_weights(), *roles.reference_weights(), *roles.reward_weights()]
        terms = self._shared(terms)
        for role in roles.trained:
            staged = self._staged_bytes(role.optim)
            terms += [c.staging(staged, role.largest)] if staged else []
        return terms if self.supervised else [*terms, self.kv_cache()]

    def kv_cache(self) -> Term:
        rollout, chosen = self.config.actor_rollout_ref.rollout, self.chosen
        each = 4 if chosen.gradients == "float32" else self.width
        return c.kv_cache(
            self.actor.shape,
            slots=self.slots,
            longest=self.longest,
            tokens=drawing.room_for(self.slots, self) if rollout.kv_cache_tokens == "auto" else rollout.kv_cache_tokens,
            width=self.width,
            lent=0 if chosen.gradients == "host" else self.part(each * self.actor.parameters),
        )

    def graphs(self) -> list[Term]:
        """Reserved from the first rollout on."""
        return drawing.graphs(self)

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
        """In the order of a step; those that this run does not have are left out."""
        stays, roles, graphs = self.resident(), self.roles, self.graphs()
        found = [Phase("load", (*self._shared([roles.actor_weights()]), c.context()))]

        def phase(name: str, terms: Iterable[Term], *, here: Iterable[Term] = (), backward: bool = False) -> None:
            back = self._shared(here) if self.parked else []
            around = (c.buffers(backward=backward, captured=bool(graphs), ranks=self.ranks), *graphs, c.context())
            found.append(Phase(name, (*stays, *back, *terms, *around)))

        if not self.supervised:
            phase("rollout", self._sampled(self.rollout))
        if self.reward_model is not None:
            reward_pass = Pass(tokens=max(PASS_TOKENS, 2 * self.longest), positions=0, width=self.width)
            phase("reward_model", self._trunk(self.reward_model, reward_pass), here=roles.reward_weights())
        if not self.supervised:
            phase("logprob", self._forward(self.chosen.tokens, self.actor.rank))
        if roles.has_reference:
            limit = self.config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
            forward = self._forward(self.chosen.tokens if limit == "auto" else limit, 0)
            phase("reference", forward, here=roles.reference_weights())
        valued = self.critic or (self.actor if roles.shares_critic else None)
        if valued is not None:
            phase("values", self._values(valued), here=roles.critic_weights())
        phase("update", self.backward(self.actor, self.update_pass), backward=True)
        if valued is not None:  # of one that shares the actor's layers, only a row of numbers is trained
            critic = self.backward(valued, self.pass_of(valued)) if self.critic else self._values(valued)
            phase("update_critic", critic, here=roles.critic_weights(), backward=True)
        phase("optimizer_step", self._optimizer_step(), backward=True)
        if not self.supervised:
            phase("sync", [c.term("gather", 0, "nothing: the embedded engine reads the trainer's own weights")])
        phase("save", [], backward=True)
        if self.config.data.val_files:
            phase(
                "eval",
                self._forward(self.chosen.tokens, self.actor.rank)
                if self.supervised
                else self._sampled(drawing.of_evaluation(self)),
            )
        return found

    def stack(self, role: Trained, a: Pass) -> Stack:
        """The layers of a role in a pass."""
        layers = role.shape.layers
        return Stack(
            shape=role.shape,
            a=a,
            recomputed=min(self.recomputed, layers),
            matmuls=self.chosen.recompute == "matmuls",
            leaving=min(self.leaving, layers - 1),
            ahead=self.chosen.activation_offload == "async",
            quantisation=self.quantisation if role.rank else None,
        )

    def backward(self, role: Trained, a: Pass) -> list[Term]:
        """The worst moment of a forward and backward pass: in a layer, at the head or its norm, at the embedding."""
        shape, stack, groups = role.shape, self.stack(role, a), self._groups(role)
        kept = stack.staying()
        head = c.head_backward(shape, a, trained=role.trains_head) if role.has_head else c.value_head(shape, a)
        waiting = [c.waiting_table(shape, width=self.width)] if shape.tied and role.trains_head else []
        exchange = exchanged(shape, a, self.sharding)
        end = [] if role.rank else [c.tables_gradient(shape, width=self.width, tied=bool(waiting))]
        moments = [
            [kept, stack.last_forward(), groups.forward_layer(), *exchange],
            [kept, head, groups.backward_head()],
            [kept, stack.last_norm(), groups.backward_head(), *waiting],
            [kept, groups.backward_table()],
            [*stack.worst_layer(), groups.backward_layer(), *exchange, *waiting],
            [*end, groups.backward_end()],
        ]
        return worst(moments)

    def _sampled(self, drawn: Drawing) -> list[Term]:
        """Prefill or decode, whichever is larger; logits are drawn from whole, wherever they were computed."""
        shape, groups = self.actor.shape, self._forward_groups(self.actor.shape, self.quantisation)
        prefill = self._layer_forward(shape, drawn.prefill, self.quantisation, groups)
        decode = [drawn.logits(), groups.forward_head()]
        if total(prefill) < total(decode):
            found = [*decode, c.less(prefill[0], "prefill", "decode")]
        else:
            found = [*prefill, c.less(decode[0], "decode", "prefill")]
        return worst([found, [groups.forward_start()]])

    def _forward(self, limit: int, rank: int) -> list[Term]:
        """Of the actor's model with or without its adapters, under the worse of the two worst mixes."""
        shape, groups = self.actor.shape, self._forward_groups(self.actor.shape, self.quantisation)
        moments = [[groups.forward_start()]]
        for a in self._passes(limit, rank):
            moments.append(self._layer_forward(shape, a, self.quantisation, groups))
            moments.append([c.head_forward(shape, a), groups.forward_head()])
        return worst(moments)

    def _values(self, valued: Trained) -> list[Term]:
        return self._trunk(valued.shape, self.pass_of(valued), self.quantisation if valued.rank else None)

    def _trunk(self, shape: Shape, a: Pass, quantisation: c.Quantisation | None = None) -> list[Term]:
        """A forward pass without an output head over the vocabulary."""
        groups = self._forward_groups(shape, quantisation, has_head=False)
        return worst([self._layer_forward(shape, a, quantisation, groups), [groups.forward_start()]])

    def _layer_forward(self, shape: Shape, a: Pass, quantisation: c.Quantisation | None, groups: Groups) -> list[Term]:
        layer = max(c.forward_layer(shape, a, quantisation), forward_attention(shape, a), key=lambda term: term.bytes)
        return [layer, c.embedded(shape, a), groups.forward_layer(), *exchanged(shape, a, self.sharding)]

    def _optimizer_step(self) -> list[Term]:
        """The actor's, or the critic's with its weights."""
        steps = [[c.step_transient(self.actor.optim.optimizer, width=self.width)]]
        if self.critic is not None:
            here = self._shared(self.roles.critic_weights()) if self.parked else []
            steps.append([c.step_transient(self.critic.optim.optimizer, width=self.width), *here])
        return worst(steps)

    def _groups(self, role: Trained) -> Groups:
        """What is gathered and reduced of a role that is trained."""
        quantised = self.quantisation if role.rank else None
        forward = self._forward_groups(role.shape, quantised, has_head=role.has_head)
        return replace(forward, trained=role.layer_parameters, trains_tables=not role.rank)

    def _forward_groups(self, shape: Shape, quantisation: c.Quantisation | None, *, has_head: bool = True) -> Groups:
        return Groups(
            shape=shape, sharding=self.sharding, width=self.width, quantisation=quantisation, has_head=has_head
        )

    def pass_of(self, role: Trained) -> Pass:
        """Of the actor or the critic, which may have a limit of its own."""
        limit = self.config.critic.ppo_max_token_len_per_gpu
        if role is self.actor or limit == "auto":
            return replace(self.update_pass, rank=role.rank)
        return self._fullest(limit, role)

    # --- host and disk ---

    def host(self) -> dict[str, int]:
        """Bytes of host memory of one rank, by what holds them."""
        return storage.host_bytes(self)

    def pinned(self) -> dict[str, int]:
        """The part of that which is pinned."""
        return storage.pinned_bytes(self)

    def disk(self) -> dict[str, int]:
        """Bytes of what a run writes."""
        return storage.disk_bytes(self)

    def _assumed(self) -> Iterator[str]:
        shape, sharding = self.shape, self.sharding
        replicas = sharding == Sharding(data=self.ranks)
        told: list[tuple[bool, str]] = [
            (bool(shape.assumption), shape.assumption),
            (True, "every prompt and response has its full length"),
            (self.ranks > 1 and replicas, "every GPU holds a whole replica"),
            (
                not replicas,
                f"by formula only: Ullage does not shard yet ({sharding.text}); weights are gathered layer by layer, "
                "gradients reduced in float32",
            ),
            (self.ranks > 1, "NCCL takes 650 MiB"),
            (shape.experts > 0, "experts are balanced; their activations are traced, not measured"),
            (shape.experts > 0 and self.actor.rank > 0, "adapters and quantisation leave experts as they are"),
            (shape.kv_lora_rank > 0, "Ullage does not run latent attention yet; its cache would hold whole keys"),
            (self.width != 2, "activations beside half precision are scaled by width, not measured"),
        ]
        yield from (text for holds, text in told if holds)
        yield from self.roles.assumptions


def worst(moments: list[list[Term]]) -> list[Term]:
    """The moment that needs most; where nothing is gathered, nothing is said of it."""
    return [term for term in max(moments, key=total) if term.bytes or term.name != "gather"]


def phases(shape: Shape, config: Config, *, ranks: int = 1) -> list[Phase]:
    """All phases of a step, in their order."""
    return Layout(shape, config, ranks=ranks).phases()
