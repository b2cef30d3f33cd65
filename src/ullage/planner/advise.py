"""Advice: what a machine can train and how, and what a model needs; the closed forms of memory and of time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

from ullage.base.errors import UsageError
from ullage.config.settle import plain, with_key
from ullage.config.tree import Config
from ullage.planner.choose import Space, host_limit, peak_phase
from ullage.planner.components import weights
from ullage.planner.fixes import least
from ullage.planner.hardware import Instance, Machine, gpus, instances
from ullage.planner.model_shape import Shape, bundled_shapes
from ullage.planner.phases import Layout
from ullage.planner.seconds import FORMULAS
from ullage.planner.sharding import Sharding
from ullage.planner.spread import Spread, best_spread, thinnest

Method = Literal["full", "LoRA", "QLoRA"]
METHODS: tuple[Method, ...] = ("full", "LoRA", "QLoRA")
ALGORITHMS = ("grpo", "ppo")
RANK = 32
SHOWN = 3
"""Kinds of GPU that are told for a method."""
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
    sharding: Sharding | None = None
    """How the weights would have to be shared out, which Ullage cannot do yet; None: whole replicas."""

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
            "fits": option is not None and self.sharding is None,
            "sharding": None if self.sharding is None else asdict(self.sharding),
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


Needs = dict[tuple[Method, str], list[Advice]]
"""By method and algorithm."""


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


def what_it_needs(shape: Shape, context: int) -> Needs:
    """For every method the instances that it fits on, by cost of 1,000 steps; then the GPUs that nobody here rents."""
    able = [rented for rented in instances() if rented.machine.gpu.trains]
    owned = {rented.machine.gpu for rented in able}
    bare = [Machine(gpu=gpu) for gpu in gpus() if gpu.trains and gpu not in owned]
    machines = [(each.machine, each) for each in able] + [(machine, None) for machine in bare]
    found: Needs = {}
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


# --- weights shared out over GPUs: by formula only ---


def what_would_fit(machine: Machine, context: int, found: list[Advice]) -> list[Advice]:
    """For every method the largest bundled model that its GPUs would hold between them, where it is a larger one."""
    whole = {(each.method, each.algorithm): 0 if each.shape is None else each.shape.parameters for each in found}
    advice = []
    for (method, algorithm), parameters in whole.items():
        larger = [shape for shape in bundled_shapes().values() if shape.parameters > parameters]
        for shape in sorted(larger, key=lambda shape: -shape.parameters) if machine.gpus > 1 else ():
            made = _shared_out(shape, method, algorithm, context, machine)
            if made is not None:
                advice.append(made)
                break
    return advice


def what_it_would_need(shape: Shape, context: int, found: Needs) -> Needs:
    """Where few kinds of GPU hold a whole replica: machines that would hold one between their GPUs, by cost."""
    able = [rented for rented in instances() if rented.machine.gpu.trains and rented.machine.gpus > 1]
    worth = sorted(able, key=lambda rented: (rented.price is None, _price_of_a_flop(rented)))
    advice: Needs = {}
    for (method, algorithm), whole in found.items():
        kinds, sharded = {each.machine.gpu.name for each in whole}, dict[str, Advice]()
        for rented in worth:
            if len(kinds) + len(sharded) >= SHOWN:
                break
            if rented.machine.gpu.name not in {*kinds, *sharded}:
                made = _shared_out(shape, method, algorithm, context, rented.machine)
                if made is not None:
                    sharded[rented.machine.gpu.name] = replace(made, instance=rented)
        advice[method, algorithm] = sorted(sharded.values(), key=_order)
    return advice


def _price_of_a_flop(rented: Instance) -> float:
    return (rented.price or 0.0) / (rented.machine.gpus * rented.machine.gpu.tflops_bf16)


def _shared_out(shape: Shape, method: Method, algorithm: str, context: int, machine: Machine) -> Advice | None:
    config, settings = base_config(method, algorithm, context)
    held = weights(shape, quantisation="nf4" if method == "QLoRA" else None).bytes
    if held > machine.gpus * machine.gpu.memory_bytes:
        return None
    if thinnest(shape, config, machine) is None:
        return None
    spread = best_spread(shape, config, machine)
    if spread is None:
        return None
    option = _option_of(spread, config, settings)
    return Advice(
        method=method, algorithm=algorithm, machine=machine, shape=shape, option=option, sharding=spread.sharding
    )


def _option_of(spread: Spread, config: Config, settings: dict[str, object]) -> Option:
    usual = plain(config, "cuda")
    changed = {key: value for key, value in spread.chosen.items() if value != usual[key]}
    binding = spread.binding
    return Option({**settings, **changed}, binding.total_bytes, binding.name, spread.host_bytes, spread.step_seconds)


def assumed(shape: Shape, context: int) -> list[str]:
    """Of a model, by whatever method."""
    return Layout(shape, base_config("QLoRA", ALGORITHMS[0], context)[0]).assumptions


def least_bytes(shape: Shape, method: Method, algorithm: str, context: int) -> int:
    """Device memory below which nothing that leaves what is learned alone runs, on one GPU."""
    config, _ = base_config(method, algorithm, context)
    needed = least(shape, config, Machine(gpu=gpus()[0]))
    assert needed is not None, "no limit of host memory was given"
    return needed


def _order(advice: Advice) -> tuple[bool, float, int]:
    cost = advice.cost
    return cost is None, cost or 0.0, advice.machine.gpu.memory_bytes
