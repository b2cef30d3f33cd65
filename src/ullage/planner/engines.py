"""The share of an external rollout engine on a GPU that the trainer uses too: KV cache, what stays asleep, weight sync.

What a fraction means differs: vLLM's `gpu_memory_utilization` is of the device's total memory, for all that the engine
itself holds, and must be free when it starts; SGLang's `mem_fraction_static` is of what is free when it starts, for
weights and cache; TGI's `cuda_memory_fraction` is of the total, and everybody's memory counts against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ullage.base.errors import UsageError
from ullage.base.units import bytes_text
from ullage.planner import components as c
from ullage.planner.components import MIB, Term, term
from ullage.planner.model_shape import Shape
from ullage.planner.sharding import local_shape

Kind = Literal["vllm", "sglang", "tgi"]
FRACTIONS: dict[Kind, str] = {
    "vllm": "gpu_memory_utilization",
    "sglang": "mem_fraction_static",
    "tgi": "cuda_memory_fraction",
}
TGI_ROOM = 0.95
"""TGI keeps to this part of its fraction (text_generation_server/models/globals.py, TGI_WIGGLE_ROOM)."""
BUCKET = 512 * MIB
"""Weights are handed over in buckets of this size (slime and miles; TRL takes half of it)."""
LOGITS = 8
"""Bytes of a logit while it is sampled from: float32, and a copy that is sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine as it is started."""

    kind: Kind
    fraction: float
    tensor: int = 1
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    """Tokens of one of its passes."""
    sleep: Literal[0, 1, 2] = 2
    """While the trainer works: 0 stays awake; 1 moves its weights to the host; 2 drops them."""
    graphs_bytes: int = 0
    """CUDA graphs, as its log tells; no formula is known."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise UsageError(f"{FRACTIONS[self.kind]} = {self.fraction}", "give a fraction above 0, 1 at most")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the engine takes of one GPU."""

    awake: tuple[Term, ...]
    asleep: tuple[Term, ...]
    sync: tuple[Term, ...]
    """Beside the trainer's and the engine's weights, while new ones are handed over."""
    host_bytes: int
    kv_tokens: int
    problem: str
    """Why it would not start; empty where it does."""

    def sequences(self, length: int) -> int:
        """How many of this length its cache holds; more of them wait or are preempted, they do not fail."""
        return self.kv_tokens // (c.pages_for(length) * c.PAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What it holds beside its cache, and how its fraction becomes that cache: fraction x base - taken."""

    weights: Term
    around: tuple[Term, ...]
    working: Term
    each: int
    """Bytes of a cached token."""
    base: float
    taken: int
    formula: str

    @property
    def beside(self) -> int:
        """Without the weights."""
        return self.working.bytes + sum(term.bytes for term in self.around)


def engine_share(shape: Shape, engine: Engine, *, capacity: int, trainer_bytes: int, width: int = 2) -> Share:
    """`trainer_bytes`: what the trainer holds while the engine starts and runs."""
    held = _held(shape, engine, capacity, trainer_bytes, width)
    rest = int(engine.fraction * held.base) - held.taken
    tokens = max(0, rest) // (held.each * c.PAGE) * c.PAGE
    inputs = {"fraction": engine.fraction, "base": held.base, "taken": held.taken}
    cache = term("kv_cache", tokens * held.each, held.formula, **inputs)
    awake = (held.weights, *held.around, held.working, cache)
    problem = _problem(engine, held, capacity, capacity - trainer_bytes) if tokens else f"is {bytes_text(-rest)} short"
    return Share(
        awake=awake,
        asleep=awake if engine.sleep == 0 else held.around,
        sync=(_bucket(local_shape(shape, engine.tensor), width),),
        host_bytes=held.weights.bytes if engine.sleep == 1 else 0,
        kv_tokens=tokens,
        problem=f"{FRACTIONS[engine.kind]} = {engine.fraction:g} {problem}" if problem else "",
    )


def fraction_for(
    shape: Shape, engine: Engine, *, kv_tokens: int, capacity: int, trainer_bytes: int, width: int = 2
) -> float:
    """The fraction at which this engine has room for so many tokens; what one calls 0.6 another calls 0.8."""
    held = _held(shape, engine, capacity, trainer_bytes, width)
    return (c.pages_for(kv_tokens) * c.PAGE * held.each + held.taken) / held.base


def _held(shape: Shape, engine: Engine, capacity: int, trainer_bytes: int, width: int) -> _Held:
    local = local_shape(shape, engine.tensor)
    weights, working = c.weights(local, width=width), _working(local, engine, width)
    around = (c.context(), *_graphs(engine), *([_nccl()] if engine.tensor > 1 else []))
    own = sum(term.bytes for term in (weights, working, *around))
    rules: dict[Kind, tuple[float, int, str]] = {
        "vllm": (capacity, own, "fraction x total - own"),
        "sglang": (capacity - trainer_bytes - c.CONTEXT, weights.bytes, "fraction x (free - context) - weights"),
        "tgi": (TGI_ROOM * capacity, own + trainer_bytes, "fraction x 0.95 total - own - the trainer's"),
    }
    base, taken, formula = rules[engine.kind]
    return _Held(
        weights=weights,
        around=around,
        working=working,
        each=local.compressed_kv_bytes_per_token // 2 * width,
        base=base,
        taken=taken,
        formula=formula,
    )


def _problem(engine: Engine, held: _Held, capacity: int, free: int) -> str:
    """Why it would not start although there is room for its cache."""
    if engine.kind == "vllm" and free < engine.fraction * capacity:
        return f"asks for {bytes_text(int(engine.fraction * capacity))} that are free, of {bytes_text(free)}"
    left = int((1 - engine.fraction) * held.base)
    needed = held.beside - c.CONTEXT
    if engine.kind == "sglang" and left < needed:
        return f"leaves {bytes_text(left)} for passes that need {bytes_text(needed)}"
    return ""


def _working(local: Shape, engine: Engine, width: int) -> Term:
    """A pass of the engine: gate, up and their product, or the logits of all its sequences."""
    mlp = width * engine.max_batched_tokens * (3 * c.mlp_width(local) + 2 * local.hidden)
    logits = LOGITS * engine.max_num_seqs * local.vocabulary * engine.tensor
    if mlp >= logits:
        return term("working_layer", mlp, "2 B x tokens (3 i + 2 h)", tokens=engine.max_batched_tokens)
    return term("head", logits, "8 B x sequences x V", sequences=engine.max_num_seqs, V=local.vocabulary)


def _graphs(engine: Engine) -> list[Term]:
    return [term("graphs", engine.graphs_bytes, "CUDA graphs, as given")] if engine.graphs_bytes else []


def _nccl() -> Term:
    return term("buffers", c.NCCL, "NCCL of several ranks: measured with one")


def _bucket(local: Shape, width: int) -> Term:
    """A tensor that is larger than a bucket goes alone."""
    largest = width * max(local.table, local.fused_experts)
    return term("gather", max(BUCKET, largest), "max(bucket, largest tensor)", bucket=BUCKET, largest=largest)
