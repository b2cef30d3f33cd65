"""Seconds of every phase of a step, by closed form: FLOPs over tensor cores, bytes over memory and over PCIe.

What a layout has to do (`Work`) knows nothing of the GPU, so that one layout is timed on many. The constants are from
benchmarks/results/*_h200_*.json, each with the file that it is fitted to; other GPUs are taken to reach the same
shares of what they are sold as. All of a step runs at full length, as the memory of it is planned.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.planner import components as c
from ullage.planner import exchange
from ullage.planner.components import Pass
from ullage.planner.hardware import GPU
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout
from ullage.planner.roles import Trained, evaluates_old_policy

MATMUL_SHARE = 0.77
"""Of the specified TFLOP/s, in matrix products of wide layers (head, speed)."""
NARROW = 100
"""Layers with h hidden take 1 + 100 / h times as long for a FLOP (speed: 0.5B, 1.5B)."""
TRAFFIC, FORWARD_TRAFFIC = 19.1, 1.9
"""Bytes through device memory for each byte that a layer saves: forward and backward; forward again (speed, state)."""
COMPILED_TRAFFIC, COMPILED_FORWARD_TRAFFIC = 14.2, 4.7
"""The same with compiled blocks, for each of the fewer bytes that they save (speed, activations)."""
LOGIT_TRAFFIC, LOGIT_FORWARD_TRAFFIC = 7.5, 2.5
"""The same for each byte of float32 logits (head)."""
DECODE_LAYER = 28e-6
"""Seconds of a layer in one step of a captured graph beside its bytes and products: eight kernels, one after another
(batch)."""
DECODE_MATMUL_SHARE = 0.56
"""Of the specified TFLOP/s, in products of as few rows as there are slots (batch, groups)."""
DECODE_NORMS, DECODE_ADAPTERS = 1.2, 3.6
"""Times as long with norms of queries and keys (groups), and with adapters (adapters)."""
LAUNCH = 1.33e-3
"""Seconds below which no pass gets through a layer, however few its tokens (fit, without graphs)."""
TRAINED_LAUNCHES, COMPILED_LAUNCHES = 1.5, 1.3
"""Times as long in each direction of a training pass, where autograd is told of every operator: 1 to 2.2 with the host
(fit, step); and with compiled blocks (step)."""
SELECTIVE_LAUNCHES = 3.42
"""Times as many where the host decides for every operator whether its result is kept (levers: recompute matmuls,
between two runs)."""
DECODE_SHARE = 0.8
"""Of the specified bandwidth, while decoding (batch, groups)."""
PCIE_ONE_WAY, PCIE_BOTH, PCIE_BESIDE = 0.86, 0.74, 0.78
"""Of one direction's specified rate: alone (activations: sync), with the other direction busy too (speed, levers,
state_again: streamed), and beside computation (activations: async)."""
OFFLOAD_COST = 0.003
"""Of the computation, for offload that is hidden behind it (activations: async 20 %)."""
HOST_BANDWIDTH = 46e9
"""Bytes a second that the host's cores read and write, 16 of them (state: host, 28 bytes for each parameter)."""
GRADIENT_SUMS, GRADIENT_STEP = 5.4, 14.2
"""Bytes that they read and write for each byte of gradients that they add up, and for each in the optimizer's step
(levers: gradients on host, between two runs)."""
STEP_BASE = 0.07
"""Seconds in which the host starts the optimizer's step, tensor after tensor: on the device, where nothing measured is
bound by bytes (levers, state_again), and beside its copies where state is streamed (speed, levers)."""
FORMULAS = (
    f"a pass = FLOPs / ({MATMUL_SHARE:g} TFLOP/s) + bytes of its elementwise work / bandwidth; at least "
    f"{LAUNCH * 1e3:g} ms for each layer, {TRAINED_LAUNCHES * LAUNCH * 1e3:.2g} ms for each and direction in training",
    "FLOPs = 2 for each parameter and token, and causal attention; twice that backward (adapters: once); "
    "once more for layers that are recomputed",
    f"rollout = rounds x response x (layers x {DECODE_LAYER * 1e6:g} us + (KV of responses, of each prompt once, and "
    f"logits) / ({DECODE_SHARE:g} bandwidth) + the longer of weights / ({DECODE_SHARE:g} bandwidth) and FLOPs / "
    f"({DECODE_MATMUL_SHARE:g} TFLOP/s)); quantised weights are made wide before",
    f"optimizer = the longer of its bytes / bandwidth and {STEP_BASE:g} s of launches, with its state / "
    f"({PCIE_BOTH:g} PCIe) where that rests on the host",
    "copies beside computation cost what they take longer than it",
    "between GPUs = bytes / (half of NVLink's rate, or PCIe's), not measured; what is gathered costs what it takes "
    "longer than the computation, sums over ranks cost all of it",
    "shares as measured on an H200, the same assumed elsewhere",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """All passes of one phase of a step, on one rank."""

    flops: float
    traffic: float
    """Bytes through device memory."""
    launches: float
    """Layers started by the host, forward or backward."""
    forward: float = 1.0
    """Share of the work that lies before the backward pass."""
    leaving: float = 0.0
    """Bytes of activations that go to the host and come back."""
    beside: bool = True
    """They do so beside the computation."""
    gradients: float = 0.0
    """Bytes of gradients that go to the host and are added there beside the backward pass."""
    gathered: float = 0.0
    """Bytes of weights and gradients that a rank sends to others beside the computation, where they are shared out."""
    exchanged: float = 0.0
    """Bytes that it sends and waits for: gradients of whole replicas, sums over the parts of a matrix."""

    def seconds(self, gpu: GPU) -> float:
        rate = MATMUL_SHARE * gpu.tflops_bf16 * 1e12
        compute = max(self.flops / rate + self.traffic / (gpu.bandwidth * 1e9), self.launches * LAUNCH)
        before, link = self.forward * compute, _link(gpu)
        waits = self._waits(before, compute - before, gpu) + max(0.0, self.gathered / link - compute)
        return compute + waits + self.exchanged / link

    def _waits(self, forward: float, backward: float, gpu: GPU) -> float:
        """What copies take longer than the computation beside them."""
        beside = PCIE_BESIDE * gpu.pcie_gbs * 1e9
        added = max(self.gradients / beside, GRADIENT_SUMS * self.gradients / HOST_BANDWIDTH)
        waits = max(0.0, added - backward)
        if self.leaving and self.beside:
            each = self.leaving / beside
            waits += max(0.0, each - forward) + max(0.0, each - backward) + OFFLOAD_COST * (forward + backward)
        elif self.leaving:
            waits += 2 * self.leaving / (PCIE_ONE_WAY * gpu.pcie_gbs * 1e9)
        return waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The rollout of one rank: prompts in passes, then a token of every slot at a time."""

    prefill: Passes
    steps: int
    layers: float
    """Of one step, weighted by how long their kinds take."""
    weight_bytes: float
    read_bytes: float
    """The cache's, and what the sampler writes and reads."""
    flops: float
    """Of one step."""
    widened: float = 0.0
    """Bytes of quantised weights that are read, and of those written that products read in their place."""
    gathered: float = 0.0
    exchanged: float = 0.0
    """Of one step, as in `Passes`."""

    def seconds(self, gpu: GPU) -> float:
        bandwidth, rate = DECODE_SHARE * gpu.bandwidth * 1e9, DECODE_MATMUL_SHARE * gpu.tflops_bf16 * 1e12
        products = max(self.weight_bytes / bandwidth, self.flops / rate)
        computed = self.layers * DECODE_LAYER + (self.read_bytes + self.widened) / bandwidth + products
        step = max(computed, self.gathered / _link(gpu))
        return self.prefill.seconds(gpu) + self.steps * (step + self.exchanged / _link(gpu))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The optimizer's steps of all roles; or nothing but copies, of roles that come and go."""

    count: float
    traffic: float = 0.0
    """Bytes through device memory in one step."""
    into: float = 0.0
    out: float = 0.0
    """Bytes from and to the host."""
    by_host: float = 0.0
    """Bytes that the host's cores read and write."""
    base: float = STEP_BASE

    def seconds(self, gpu: GPU) -> float:
        pcie = gpu.pcie_gbs * 1e9 * (PCIE_BOTH if self.into and self.out else PCIE_ONE_WAY)
        copies = max(self.into, self.out) / pcie
        on_device = max(self.traffic / (gpu.bandwidth * 1e9), self.base + copies)
        return self.count * (on_device + self.by_host / HOST_BANDWIDTH)


Work = Passes | Decoding | Steps


def _link(gpu: GPU) -> float:
    """Bytes a second from one GPU to another, in one direction."""
    return max(gpu.interconnect_gbs / 2, gpu.pcie_gbs) * 1e9


def step_seconds(layout: Layout, gpu: GPU) -> dict[str, float]:
    """Of every phase of a step that takes time, in their order."""
    return {name: work.seconds(gpu) for name, work in step_work(layout).items()}


def step_work(layout: Layout) -> dict[str, Work]:
    """What each phase has to do; each part depends on few of the keys that can be left open."""
    return {
        **sampling_work(layout),
        **forward_work(layout),
        **update_work(layout),
        **optimizer_work(layout),
        **parking_work(layout),
    }


def sampling_work(layout: Layout) -> dict[str, Work]:
    """The rollout: of the open keys, slots matter."""
    if layout.supervised:
        return {}
    shape, data, rollout = layout.actor.shape, layout.config.data, layout.config.actor_rollout_ref.rollout
    prompts, samples = _share(layout)
    slots = layout.slots
    if rollout.kv_cache_tokens != "auto":  # a cache that is too small for all slots keeps some of them waiting
        slots = max(1, min(slots, rollout.kv_cache_tokens // layout.longest))
    passes = -(-prompts * data.max_prompt_length // layout.rollout.prefill.tokens)
    kinds = (DECODE_NORMS if shape.qk_norm else 1.0) * (DECODE_ADAPTERS if layout.actor.rank else 1.0)
    together = min(rollout.n, slots) if layout.rollout.reads_prompts_once else 1
    read = data.max_prompt_length / together + data.max_response_length / 2
    decoding = Decoding(
        prefill=_forward(layout, shape, _batch(layout, prompts, 0, passes, split=1), head=False),
        steps=-(-samples // slots) * data.max_response_length,
        layers=shape.layers * kinds,
        weight_bytes=_wide_bytes(layout, shape) or _held_bytes(layout, shape),
        widened=_held_bytes(layout, shape) + _wide_bytes(layout, shape) if layout.quantisation else 0.0,
        read_bytes=slots * (read * shape.kv_bytes_per_token * layout.width / 2 + 8 * shape.vocabulary),
        flops=slots * 2 * shape.active_parameters,
        gathered=exchange.others(layout.sharding.shards) * layout.roles.actor_weights().bytes,
        exchanged=exchange.of_matrices(layout, shape, slots),
    )
    return {"rollout": decoding}


def forward_work(layout: Layout) -> dict[str, Work]:
    """Passes without gradients: of the open keys, tokens matter."""
    prompts, samples = _share(layout)
    batch = _batch(layout, prompts, samples, _passes(layout, samples))
    found: dict[str, Work] = {}
    if layout.reward_model is not None:
        found["reward_model"] = _forward(layout, layout.reward_model, batch, head=False)
    if not layout.supervised and evaluates_old_policy(layout.config):
        found["logprob"] = _forward(layout, layout.actor.shape, batch, head=True)
    if layout.reference:
        found["reference"] = _forward(layout, layout.actor.shape, batch, head=True)
    if layout.critic is not None:
        found["values"] = _forward(layout, layout.critic.shape, batch, head=False)
    return found


def update_work(layout: Layout) -> dict[str, Work]:
    """Forward and backward: tokens, recompute, offload and gradients matter."""
    found: dict[str, Work] = {"update": _update(layout, layout.actor)}
    if layout.critic is not None:
        found["update_critic"] = _update(layout, layout.critic)
    return found


def optimizer_work(layout: Layout) -> dict[str, Work]:
    """State and gradients matter."""
    chosen, roles = layout.chosen, layout.roles.trained
    counts = [(role.optim.optimizer, layout.part(role.parameters)) for role in roles]
    trained = sum(count for _, count in counts)
    if chosen.optimizer_state == "host":
        return {"optimizer_step": Steps(count=_mini_batches(layout), by_host=28 * trained)}
    streamed = chosen.optimizer_state == "streamed"
    state = sum((c.moment_bytes(kind) + 4 * layout.has_master) * count for kind, count in counts)
    arriving = layout.width * trained if chosen.gradients == "host" else 0
    steps = Steps(
        count=_mini_batches(layout),
        # State is read and written; gradients are read twice, once for their norm; weights are written, and read where
        # there is no master.
        traffic=2 * state + (3 if layout.has_master else 4) * layout.width * trained,
        into=(state if streamed else 0) + arriving,
        out=state if streamed else 0,
        by_host=GRADIENT_STEP * arriving,
    )
    return {"optimizer_step": steps}


def parking_work(layout: Layout) -> dict[str, Work]:
    """Roles that wait on the host: their weights come for each of their phases, and trained ones go back."""
    parked = layout.host()["roles"] if layout.parked else 0
    if not parked:
        return {}
    critic = layout.critic
    # A critic comes for its values; for each update it comes and is written back.
    trained = layout.part(layout.width * critic.shape.trunk_parameters) if critic and critic.owns_weights else 0
    return {"parking": Steps(count=1, into=parked + 2 * trained * _mini_batches(layout), base=0.0)}


# --- passes ---


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of full length that a rank's passes of a phase go over."""

    tokens: int
    positions: int
    """Those that carry loss."""
    pairs: float
    """Of a token and one that it attends to."""
    passes: int


def _share(layout: Layout) -> tuple[int, int]:
    """Prompts and samples of a step on one rank."""
    prompts = -(-layout.config.data.train_batch_size // layout.sharding.data)
    return prompts, prompts * (1 if layout.supervised else layout.config.actor_rollout_ref.rollout.n)


def _mini_batches(layout: Layout) -> int:
    """Steps of the optimizer in a step of the run."""
    actor, batch = layout.config.actor_rollout_ref.actor, layout.config.data.train_batch_size
    return actor.ppo_epochs * -(-batch // (actor.ppo_mini_batch_size or batch))


def _passes(layout: Layout, samples: int) -> int:
    """All of them under the actor's limit; roles with a limit of their own are timed as if they had none."""
    return -(-samples // layout.full_length_samples)


def _batch(layout: Layout, prompts: int, samples: int, passes: int, split: int = 0) -> Batch:
    """Of one rank: `split` of them share the positions of a pass, by default as the layout says."""
    prompt, response = layout.config.data.max_prompt_length, layout.config.data.max_response_length
    ranks = split or layout.sharding.sequence
    return Batch(
        tokens=-(-(prompts * prompt + samples * (response - 1)) // ranks),
        positions=-(-samples * response // ranks),
        pairs=(prompts * prompt**2 / 2 + samples * (prompt * response + response**2 / 2)) / ranks,
        passes=passes,
    )


def _forward(layout: Layout, shape: Shape, batch: Batch, *, head: bool) -> Passes:
    flops = _layer_flops(shape, batch)
    saved = _saved(layout, shape, batch, 0)
    traffic = _factors(layout)[1] * saved + batch.passes * _weight_bytes(layout, shape)
    if head:
        flops += 2 * shape.table * batch.positions
        traffic += LOGIT_FORWARD_TRAFFIC * 4 * shape.vocabulary * batch.positions
    held = c.weights(shape, width=layout.width, quantisation=layout.quantisation, head=head).bytes
    return Passes(
        flops=flops,
        traffic=traffic,
        launches=batch.passes * shape.layers,
        gathered=batch.passes * exchange.others(layout.sharding.shards) * held,
        exchanged=exchange.forward(layout, shape, batch.tokens),
    )


def _layer_flops(shape: Shape, batch: Batch) -> float:
    """Of all layers, forward; more where they are narrow, in whose products tensor cores wait."""
    products = 2 * batch.tokens * (shape.active_parameters - shape.table) + 4 * shape.layers * shape.query * batch.pairs
    return products * (1 + NARROW / shape.hidden)


def _saved(layout: Layout, shape: Shape, batch: Batch, rank: int) -> float:
    """Bytes that all layers would save of all passes."""
    a = Pass(tokens=batch.tokens, positions=0, width=layout.width, compiled=layout.config.memory.compile, rank=rank)
    return shape.layers * c.saved_by_layer(shape, a)


def _factors(layout: Layout) -> tuple[float, float]:
    """Traffic for a byte saved: forward and backward, and forward alone."""
    compiled = layout.config.memory.compile
    return (COMPILED_TRAFFIC, COMPILED_FORWARD_TRAFFIC) if compiled else (TRAFFIC, FORWARD_TRAFFIC)


def _launches(layout: Layout) -> float:
    """In each direction of a training pass, times those of one without gradients."""
    if layout.chosen.recompute == "matmuls":
        return SELECTIVE_LAUNCHES
    return COMPILED_LAUNCHES if layout.config.memory.compile else TRAINED_LAUNCHES


def _weight_bytes(layout: Layout, shape: Shape) -> float:
    """Read in one forward pass; 4-bit and 8-bit weights are also written and read in their wide form."""
    return _held_bytes(layout, shape) + 2 * _wide_bytes(layout, shape)


def _held_bytes(layout: Layout, shape: Shape) -> float:
    return c.weights(shape, width=layout.width, quantisation=layout.quantisation, head=False).bytes


def _wide_bytes(layout: Layout, shape: Shape) -> float:
    """Of quantised weights."""
    return layout.width * sum(number * layer.size for number, layer in shape.linears) if layout.quantisation else 0.0


def _update(layout: Layout, role: Trained) -> Passes:
    shape, chosen = role.shape, layout.chosen
    prompts, samples = (layout.config.actor_rollout_ref.actor.ppo_epochs * count for count in _share(layout))
    mini_batches = _mini_batches(layout)
    passes = mini_batches * _passes(layout, -(-samples // mini_batches))
    batch = _batch(layout, prompts, samples, passes)
    whole, forward = _factors(layout)
    saved = _saved(layout, shape, batch, role.rank)
    again = min(layout.recomputed, shape.layers) / shape.layers
    backward = 1 if role.rank else 2
    products = 1 + backward + (0.0 if chosen.recompute == "matmuls" else again)
    weights = passes * _weight_bytes(layout, shape)
    gradients = passes * layout.width * role.parameters
    head = batch.positions if role.has_head else 0
    return Passes(
        # The head's logits are made again in the backward pass.
        flops=products * _layer_flops(shape, batch) + (6 if role.rank else 8) * shape.table * head,
        # Gradients of a pass are written, then read with the sum so far, and written into it.
        traffic=(whole + again * forward) * saved
        + (3 + again) * weights
        + 4 * gradients
        + LOGIT_TRAFFIC * 4 * shape.vocabulary * head,
        launches=(2 + again) * passes * shape.layers * _launches(layout),
        forward=1 / (1 + backward + again),
        leaving=_leaving(layout, role, batch),
        beside=chosen.activation_offload == "async",
        gradients=gradients if chosen.gradients == "host" else 0.0,
        gathered=exchange.of_shards(layout, role, passes),
        exchanged=exchange.of_replicas(layout, role, mini_batches)
        + (1 + again) * exchange.forward(layout, shape, batch.tokens)
        + exchange.backward(layout, shape, batch.tokens),
    )


def _leaving(layout: Layout, role: Trained, batch: Batch) -> float:
    """Bytes of activations that wait on the host, over all passes."""
    if not layout.leaving:
        return 0.0
    compiled = layout.config.memory.compile
    a = Pass(tokens=batch.tokens, positions=0, width=layout.width, compiled=compiled, rank=role.rank)
    return sum(layout.stack(role, a).moved)
