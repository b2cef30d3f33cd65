"""Seconds of every phase of a step, by closed form.

What a layout has to do (`Work`) knows nothing of the GPU, so that one layout is timed on many.

The constants are from benchmarks/results/*_h200_*.json, each with the file that it is fitted to. All of a step runs at
full length, as the memory of it is planned.
"""

from __future__ import annotations

from dataclasses import dataclass

from ullage.planner import components as c
from ullage.planner import exchange
from ullage.planner.components import Pass
from ullage.planner.drawing import room_for
from ullage.planner.hardware import GPU
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout
from ullage.planner.roles import Trained, evaluates_old_policy
from ullage.planner.work import (
    DECODE_LAYER,
    DECODE_MATMUL_SHARE,
    DECODE_SHARE,
    GRADIENT_STEP,
    LAUNCH,
    MATMUL_SHARE,
    PCIE_BOTH,
    STEP_BASE,
    Decoding,
    Passes,
    Steps,
    Work,
)

NARROW = 122
"""Layers with h hidden take 1 + 122 / h times as long for a FLOP (speed: 0.5B, 1.5B)."""
TRAFFIC, FORWARD_TRAFFIC = 19.3, 1.8
"""Bytes through device memory for each byte that a layer saves: forward and backward; forward again (speed, state)."""
COMPILED_TRAFFIC, COMPILED_FORWARD_TRAFFIC = 20.0, 5.2
"""The same with compiled blocks, for each of the fewer bytes that they save (speed, activations)."""
REMADE_TRAFFIC = 2.3
"""The same for what `matmuls` makes again: norms, activations and gated products (levers)."""
LOGIT_TRAFFIC, LOGIT_FORWARD_TRAFFIC = 7.5, 2.5
"""The same for each byte of float32 logits (head)."""
DECODE_NORMS, DECODE_ADAPTERS = 1.2, 3.6
"""Times as long with norms of queries and keys (groups), and with adapters (adapters)."""
TRAINED_LAUNCHES, COMPILED_LAUNCHES = 1.9, 1.3
"""Times as long in each direction of a training pass, where autograd is told of every operator: 1 to 2.8 with the host
(fit, step: four hosts); and with compiled blocks (step)."""
SELECTIVE_LAUNCHES = 3.4
"""Where `matmuls` finds layers that it knows no recipe for, and the host is asked about every operator."""
OFFLOADED_LAUNCHES = 1.6
"""Times as long again where the host hands on everything that a layer saves (step: 1.5B, 7B, between the two); the
inputs of layers that run again are no more than one tensor each."""
FORMULAS = (
    f"a pass = FLOPs / ({MATMUL_SHARE:g} TFLOP/s) + bytes of its elementwise work / bandwidth; at least "
    f"{LAUNCH * 1e3:g} ms for each layer, {TRAINED_LAUNCHES * LAUNCH * 1e3:.2g} ms for each and direction in training",
    "FLOPs = 2 for each parameter and token, and causal attention; twice that backward (adapters: once); "
    "once more for layers that are recomputed, but with matmuls, which makes only elementwise work again",
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
        held = (count for count in range(slots, 0, -1) if room_for(count, layout) <= rollout.kv_cache_tokens)
        slots = next(held, 1)
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
    if layout.recomputed and layout.chosen.recompute == "matmuls" and not layout.shape.remakes:
        return SELECTIVE_LAUNCHES
    plain = COMPILED_LAUNCHES if layout.config.memory.compile else TRAINED_LAUNCHES
    return plain * OFFLOADED_LAUNCHES if layout.leaving and layout.chosen.recompute != "full" else plain


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
    again, cheap = _again(layout, shape)
    backward = 1 if role.rank else 2
    weights = passes * _weight_bytes(layout, shape)
    gradients = passes * layout.width * role.parameters
    head = batch.positions if role.has_head else 0
    return Passes(
        # The head's logits are made again in the backward pass.
        flops=(1 + backward + again) * _layer_flops(shape, batch) + (6 if role.rank else 8) * shape.table * head,
        # Gradients of a pass are written, then read with the sum so far, and written into it.
        traffic=(whole + (REMADE_TRAFFIC if cheap > again else forward) * cheap) * saved
        + (3 + again) * weights
        + 4 * gradients
        + LOGIT_TRAFFIC * 4 * shape.vocabulary * head,
        launches=(2 + cheap) * passes * shape.layers * _launches(layout),
        forward=1 / (1 + backward + again),
        leaving=_leaving(layout, role, batch),
        beside=chosen.activation_offload == "async",
        gradients=gradients if chosen.gradients == "host" else 0.0,
        gathered=exchange.of_shards(layout, role, passes),
        exchanged=exchange.of_replicas(layout, role, mini_batches)
        + (1 + again) * exchange.forward(layout, shape, batch.tokens)
        + exchange.backward(layout, shape, batch.tokens),
    )


def _again(layout: Layout, shape: Shape) -> tuple[float, float]:
    """Shares of a forward pass that the backward pass does once more: of its products, and of what is cheap."""
    share = min(layout.recomputed, shape.layers) / shape.layers
    return (0.0 if layout.chosen.recompute == "matmuls" else share), share


def _leaving(layout: Layout, role: Trained, batch: Batch) -> float:
    """Bytes of activations that wait on the host, over all passes."""
    if not layout.leaving:
        return 0.0
    compiled = layout.config.memory.compile
    a = Pass(tokens=batch.tokens, positions=0, width=layout.width, compiled=compiled, rank=role.rank)
    return sum(layout.stack(role, a).moved)
