"""Advice: what a machine can train and how, and what a model needs, by the closed forms and a simple model of time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal

from ullage.base.errors import UsageError
from ullage.config.settle import ACTOR_TOKENS, NUM_SLOTS, with_key
from ullage.config.tree import Config
from ullage.planner.components import weights
from ullage.planner.hardware import GPU, Instance, Machine, gpus, instances
from ullage.planner.model_shape import Shape, bundled_shapes
from ullage.planner.phases import Layout
from ullage.planner.plan import with_slack

Method = Literal["full", "LoRA", "QLoRA"]
METHODS: tuple[Method, ...] = ("full", "LoRA", "QLoRA")
ALGORITHMS = ("grpo", "ppo")
RANK = 32
FEW_SLOTS = 8
"""Sequences decoded at once where their cache is too large otherwise."""
PROMPT_SHARE = 4
"""A context is one part prompt and three parts response."""
UTILISATION = ((0.494e9, 0.277), (1.54e9, 0.383), (7.6e9, 0.504))
"""Parameters, and the share of the specified rate that the update reached on an H200 without recompute and compile
(benchmarks/results/update_h200_speed.json); other GPUs are taken to reach the same share."""
DECODE_SHARE = 0.6
"""Of the specified bandwidth, in decoding: what good engines reach of the bytes they must read."""
PCIE_SHARE = 0.8
"""Of the specified rate of each direction, with copies in both at once: 50.7 of 63 GB/s on an H200."""
SPEEDS = (
    "update = tokens x FLOPs a token / (gpus x TFLOP/s x utilisation), or the copies to the host beside it, if longer",
    "FLOPs a token = k (2 active parameters + 2 context x width of queries x layers); k = 1 for each forward pass, "
    "2 for the backward pass, 1 where only adapters train",
    f"rollout = rounds x response x (weights + slots x KV) / ({DECODE_SHARE:g} bandwidth), or its FLOPs, if longer",
    f"optimizer = bytes of its state / bandwidth, or / ({PCIE_SHARE:g} PCIe) where they rest on the host",
    "utilisation = 28, 38 and 50 % at 0.5B, 1.5B and 7B as measured on an H200, the same share assumed elsewhere",
    "cost of 1,000 steps = 1000 x seconds x USD an hour / 3600, list price on demand on the date of its source",
)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step has to do, whatever the machine."""

    active: int
    parameters: int
    """Trained."""
    flops: float
    """Of forward and backward passes."""
    prefill: float
    samples: int
    slots: int
    response: int
    decode_flops: float
    """Of one token."""
    weight_bytes: int
    cache_bytes: int
    """Of one sequence at half its length."""
    state_bytes: float
    """Read and written in place by the optimizer."""
    moved_bytes: float
    """To the host and back around the optimizer's step and between phases, by every replica."""
    beside_bytes: float
    """To the host and back beside the update, by all replicas together."""

    def seconds(self, gpu: GPU, ranks: int) -> float:
        """Of one step on so many replicas."""
        rate = gpu.tflops_bf16 * 1e12 * utilisation(self.active)
        here = -(-self.samples // ranks)
        slots = min(self.slots, here)
        read = (self.weight_bytes + slots * self.cache_bytes) / (DECODE_SHARE * gpu.bandwidth * 1e9)
        decode = -(-here // slots) * self.response * max(read, slots * self.decode_flops / rate)
        pcie = PCIE_SHARE * gpu.pcie_gbs * 1e9
        update = max((self.prefill + self.flops) / rate, self.beside_bytes / pcie) / ranks
        optimizer = self.state_bytes / (gpu.bandwidth * 1e9) + self.moved_bytes / pcie
        link = max(gpu.interconnect_gbs / 2, gpu.pcie_gbs) * 1e9
        return decode + update + optimizer + 4 * self.parameters * (ranks - 1) / ranks / link


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run it: keys beside the defaults, what that needs, and its work."""

    settings: dict[str, object]
    peak_bytes: int
    binding_phase: str
    host_bytes: int
    work: Work

    def fits(self, machine: Machine) -> bool:
        host = machine.host_bytes
        enough = host is None or self.host_bytes * machine.count <= host
        return enough and self.peak_bytes <= machine.gpu.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The fastest option of one method for a model that fits a machine; no option where none does."""

    method: Method
    algorithm: str
    machine: Machine
    shape: Shape | None
    option: Option | None
    instance: Instance | None = None

    @property
    def seconds(self) -> float | None:
        return None if self.option is None else self.option.work.seconds(self.machine.gpu, self.machine.gpus)

    @property
    def cost(self) -> float | None:
        """USD for 1,000 steps."""
        if self.seconds is None or self.instance is None or self.instance.price is None:
            return None
        return 1000 * self.seconds * self.instance.price * self.machine.nodes / 3600

    def as_json(self) -> dict[str, Any]:
        option, rented = self.option, self.instance
        return {
            "method": self.method,
            "algorithm": self.algorithm,
            "model": None if self.shape is None else self.shape.name,
            "parameters": None if self.shape is None else self.shape.parameters,
            "gpu": self.machine.gpu.name,
            "gpus": self.machine.gpus,
            "capacity_bytes": self.machine.gpu.memory_bytes,
            "fits": option is not None,
            "peak_bytes": None if option is None else option.peak_bytes,
            "binding_phase": None if option is None else option.binding_phase,
            "host_bytes": None if option is None else option.host_bytes * self.machine.count,
            "settings": None if option is None else option.settings,
            "step_seconds": self.seconds,
            "instance": None if rented is None else rented.name,
            "provider": None if rented is None else rented.provider,
            "usd_per_hour": None if rented is None else rented.price,
            "price_date": None if rented is None else rented.date,
            "usd_per_1000_steps": self.cost,
        }


def utilisation(parameters: float) -> float:
    """Between the measured sizes by logarithm, beyond them as at the nearest."""
    (low, at_low), *others = UTILISATION
    if parameters <= low:
        return at_low
    for high, at_high in others:
        if parameters <= high:
            return at_low + (at_high - at_low) * math.log(parameters / low) / math.log(high / low)
        low, at_low = high, at_high
    return at_low


def base_config(method: Method, algorithm: str, context: int) -> tuple[Config, dict[str, object]]:
    """The defaults with a method, an algorithm and a length; and the keys that say so."""
    if context < 2 * PROMPT_SHARE:
        raise UsageError(f"--context {context}: too short", f"give at least {2 * PROMPT_SHARE} tokens")
    settings: dict[str, object] = {"algorithm.name": algorithm}
    settings["data.max_prompt_length"] = context // PROMPT_SHARE
    settings["data.max_response_length"] = context - context // PROMPT_SHARE
    if method != "full":
        settings["actor_rollout_ref.model.lora_rank"] = RANK
        if algorithm == "ppo":
            settings["critic.model.lora_rank"] = RANK
    if method == "QLoRA":
        settings["actor_rollout_ref.model.quantization"] = "nf4"
    config = Config()
    for key, value in settings.items():
        config = with_key(config, key, value)
    return config, settings


def options(shape: Shape, method: Method, algorithm: str, context: int, ranks: int) -> list[Option]:
    """Every combination of levers that leave what is learned alone."""
    return [_option(shape, config, settings, ranks) for config, settings in combinations(method, algorithm, context)]


@cache
def combinations(method: Method, algorithm: str, context: int) -> tuple[tuple[Config, dict[str, object]], ...]:
    """The configs of all combinations, and the keys that say so; the last has every lever pulled."""
    base, settings = base_config(method, algorithm, context)
    return tuple((config, {**settings, **pulled}) for config, pulled in _combinations(base, method, context))


def sparest(method: Method, algorithm: str, context: int) -> tuple[tuple[Config, dict[str, object]], ...]:
    """Those of which one needs least: everything pulled, with and without activations on the host."""
    last = combinations(method, algorithm, context)[-6:]
    return last[2], last[5]


def _combinations(base: Config, method: Method, context: int) -> Iterator[tuple[Config, dict[str, object]]]:
    """Each lever is a few sets of keys to change, the first of them as the run would be by itself."""
    full = method == "full"
    parts: list[tuple[dict[str, object], ...]] = [
        ({}, {"memory.optimizer_state": "streamed"}) if full else ({},),
        ({}, {"memory.gradients": "host"}) if full else ({},),
        ({}, {"memory.offload_roles": True}) if full and base.algorithm.name == "ppo" else ({},),
        ({"memory.recompute": "none"}, {"memory.recompute": "full"}),
        ({}, {"memory.activation_offload": "async"}),
        ({}, {ACTOR_TOKENS: context}, {ACTOR_TOKENS: context, NUM_SLOTS: FEW_SLOTS}),
    ]
    for chosen in product(*parts):
        config, pulled = base, {key: value for part in chosen for key, value in part.items()}
        for key, value in pulled.items():
            config = with_key(config, key, value)
        yield config, pulled


def _option(shape: Shape, config: Config, settings: dict[str, object], ranks: int) -> Option:
    layout = Layout(shape, config, ranks=ranks)
    binding = max((with_slack(phase) for phase in layout.phases()), key=lambda phase: phase.total_bytes)
    host = sum(layout.host().values())
    return Option(settings, binding.total_bytes, binding.name, host, _work(shape, config, layout))


def _work(shape: Shape, config: Config, layout: Layout) -> Work:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    batch, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    chosen = layout.chosen
    tokens = batch * (prompt + n * response)
    forward = 2 * shape.active_parameters + 2 * (prompt + response) * shape.query * shape.layers
    backward = 1 if layout.actor.rank else 2
    roles = [layout.actor, *([layout.critic] if layout.critic else [])]
    passes = 2 + backward + (1 if layout.recomputed else 0)
    trained = sum(role.parameters for role in roles)
    micro_batches = -(-tokens // max(1, layout.update_pass.tokens))
    host = layout.host()
    moved = (12 * trained if chosen.optimizer_state == "streamed" else 0) + host["roles"]
    beside = host["activations"] + (2 * trained if chosen.gradients == "host" else 0)
    return Work(
        active=shape.active_parameters,
        parameters=trained,
        flops=len(roles) * passes * forward * tokens,
        prefill=forward * batch * prompt,
        samples=batch * n,
        slots=chosen.slots,
        response=response,
        decode_flops=2 * shape.active_parameters,
        weight_bytes=weights(shape, width=layout.width, quantisation=layout.quantisation).bytes,
        cache_bytes=shape.kv_bytes_per_token * (prompt + response // 2),
        state_bytes=0.0 if chosen.optimizer_state == "streamed" else 2 * 14.0 * trained,
        moved_bytes=moved,
        beside_bytes=beside * micro_batches,
    )


def fastest(choices: list[Option], machine: Machine) -> Option | None:
    """Of those that fit; the first of equals."""
    fitting = [option for option in choices if option.fits(machine)]
    return min(fitting, key=lambda option: option.work.seconds(machine.gpu, machine.gpus), default=None)


def what_fits(machine: Machine, context: int) -> list[Advice]:
    """For every method the largest bundled model that fits, and the fastest way to run it."""
    shapes = sorted(bundled_shapes().values(), key=lambda shape: -shape.parameters)
    found = []
    for method, algorithm in product(METHODS, ALGORITHMS):
        best = ((shape, _fastest_of(shape, method, algorithm, context, machine)) for shape in shapes)
        shape, option = next(((shape, option) for shape, option in best if option is not None), (None, None))
        found.append(Advice(method=method, algorithm=algorithm, machine=machine, shape=shape, option=option))
    return found


def _fastest_of(shape: Shape, method: Method, algorithm: str, context: int, machine: Machine) -> Option | None:
    held = weights(shape, quantisation="nf4" if method == "QLoRA" else None).bytes
    if held > machine.gpu.memory_bytes:  # no lever moves these away
        return None
    spare = (_option(shape, *choice, machine.gpus) for choice in sparest(method, algorithm, context))
    if not any(option.peak_bytes <= machine.gpu.memory_bytes for option in spare):
        return None
    return fastest(options(shape, method, algorithm, context, machine.gpus), machine)


def what_it_needs(shape: Shape, context: int) -> dict[tuple[Method, str], list[Advice]]:
    """For every method the instances that it fits on, by cost of 1,000 steps; then the GPUs that nobody here rents."""
    able = [rented for rented in instances() if trains(rented.machine.gpu)]
    owned = {rented.machine.gpu for rented in able}
    bare = [Machine(gpu=gpu) for gpu in gpus() if trains(gpu) and gpu not in owned]
    found: dict[tuple[Method, str], list[Advice]] = {}
    for method, algorithm in product(METHODS, ALGORITHMS):
        # More ranks than two need no more of a GPU: each has a smaller part of the batch.
        choices = {several: options(shape, method, algorithm, context, 1 + several) for several in (False, True)}
        advice = []
        for machine, rented in [(each.machine, each) for each in able] + [(machine, None) for machine in bare]:
            option = fastest(choices[machine.gpus > 1], machine)
            if option is not None:
                made = Advice(
                    method=method, algorithm=algorithm, machine=machine, shape=shape, option=option, instance=rented
                )
                advice.append(made)
        found[method, algorithm] = sorted(advice, key=_order)
    return found


def least_bytes(shape: Shape, method: Method, algorithm: str, context: int) -> int:
    """Device memory below which no combination of levers runs, on one GPU."""
    return min(_option(shape, *choice, 1).peak_bytes for choice in sparest(method, algorithm, context))


def trains(gpu: GPU) -> bool:
    """Whether Ullage trains on it: CUDA, and bf16 in its tensor cores."""
    return gpu.vendor == "NVIDIA" and gpu.tensor_dtype == "bf16"


def _order(advice: Advice) -> tuple[bool, float, int]:
    cost = advice.cost
    return cost is None, cost or 0.0, advice.machine.gpu.memory_bytes
