"""Advice: what a machine can train and how, and what a model needs; the closed forms of memory and of time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from ullage.base.errors import UsageError
from ullage.config.settle import plain, with_key
from ullage.config.tree import Config
from ullage.planner.choose import Space, host_limit, peak_phase
from ullage.planner.components import weights
from ullage.planner.fixes import least, trains
from ullage.planner.hardware import Instance, Machine, gpus, instances
from ullage.planner.model_shape import Shape, bundled_shapes
from ullage.planner.seconds import FORMULAS

Method = Literal["full", "LoRA", "QLoRA"]
METHODS: tuple[Method, ...] = ("full", "LoRA", "QLoRA")
ALGORITHMS = ("grpo", "ppo")
RANK = 32
PROMPT_SHARE = 4
"""A context is one part prompt and three parts response."""
SPEEDS = (
    *FORMULAS,
    "cost of 1,000 steps = 1000 x seconds x USD an hour / 3600, list price on demand on the date of its source",
)


@dataclass(frozen=True, slots=True)
class Option:
    """The fastest way to run it on a machine: keys beside the defaults, what that needs, and how long a step takes."""

    settings: dict[str, object]
    peak_bytes: int
    binding_phase: str
    host_bytes: int
    seconds: float


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
        return None if self.option is None else self.option.seconds

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


class Search:
    """The fastest way to train one model by one method, on many machines."""

    def __init__(self, shape: Shape, method: Method, algorithm: str, context: int) -> None:
        self._shape = shape
        self._config, self._settings = base_config(method, algorithm, context)
        self._spaces: dict[int, Space] = {}
        self._known: dict[Machine, Option | None] = {}

    def fastest(self, machine: Machine) -> Option | None:
        """None where nothing fits. Machines often differ in the host's memory alone, which seldom decides."""
        roomy = replace(machine, host_bytes=None)
        if roomy not in self._known:
            self._known[roomy] = self._option(roomy)
        option, host = self._known[roomy], machine.host_bytes
        if option is None or host is None or option.host_bytes * machine.count <= host:
            return option
        return self._option(machine)

    def _option(self, machine: Machine) -> Option | None:
        """With the keys that are not as they would be anyway."""
        if machine.gpus not in self._spaces:
            self._spaces[machine.gpus] = Space(self._shape, self._config, machine.gpus)
        space = self._spaces[machine.gpus]
        way, fits = space.best(machine.gpu, machine.gpu.memory_bytes, host_limit(machine))
        if not fits:
            return None
        usual = plain(self._config, "cuda")
        changed = {key: value for key, value in way.values.items() if value != usual[key]}
        layout = space.layout(way.held, way.made)
        binding, host = peak_phase(layout), sum(layout.host().values())
        return Option({**self._settings, **changed}, binding.total_bytes, binding.name, host, way.seconds)


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
    config, _ = base_config(method, algorithm, context)
    needed = least(shape, config, machine)
    if needed is None or needed > machine.gpu.memory_bytes:
        return None
    return Search(shape, method, algorithm, context).fastest(machine)


def what_it_needs(shape: Shape, context: int) -> dict[tuple[Method, str], list[Advice]]:
    """For every method the instances that it fits on, by cost of 1,000 steps; then the GPUs that nobody here rents."""
    able = [rented for rented in instances() if trains(rented.machine.gpu)]
    owned = {rented.machine.gpu for rented in able}
    bare = [Machine(gpu=gpu) for gpu in gpus() if trains(gpu) and gpu not in owned]
    machines = [(each.machine, each) for each in able] + [(machine, None) for machine in bare]
    found: dict[tuple[Method, str], list[Advice]] = {}
    for method, algorithm in product(METHODS, ALGORITHMS):
        needed = least_bytes(shape, method, algorithm, context)
        search = Search(shape, method, algorithm, context)
        advice = []
        for machine, rented in machines:
            option = search.fastest(machine) if machine.gpu.memory_bytes >= needed else None
            if option is not None:
                made = Advice(
                    method=method, algorithm=algorithm, machine=machine, shape=shape, option=option, instance=rented
                )
                advice.append(made)
        found[method, algorithm] = sorted(advice, key=_order)
    return found


def least_bytes(shape: Shape, method: Method, algorithm: str, context: int) -> int:
    """Device memory below which nothing that leaves what is learned alone runs, on one GPU."""
    config, _ = base_config(method, algorithm, context)
    needed = least(shape, config, Machine(gpu=gpus()[0]))
    assert needed is not None, "no limit of host memory was given"
    return needed


def _order(advice: Advice) -> tuple[bool, float, int]:
    cost = advice.cost
    return cost is None, cost or 0.0, advice.machine.gpu.memory_bytes
