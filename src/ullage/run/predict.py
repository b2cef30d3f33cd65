"""What a run will allocate, phase by phase, by a trace of its own code: on any machine, before a weight is loaded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from ullage.base.errors import ModelError
from ullage.config.settle import choices_of, with_key
from ullage.config.tree import Config
from ullage.engine.optimizer import Optimizer
from ullage.engine.placement import Piece
from ullage.engine.streams import hollow_bytes
from ullage.model.load import PACKAGED, guard, source_of
from ullage.planner.model_shape import Shape, find_shape
from ullage.planner.phases import Layout
from ullage.planner.replay import extrapolate, graphs_bytes, least_capacity, replay
from ullage.rollout.embedded.decoder import Decoder, Text
from ullage.run import trace
from ullage.run.rehearsal import Mix, Rehearsal
from ullage.run.trace_phases import TracedCapture, TracedTarget, record_phases

SHALLOW = (3, 5)
"""Layers of the two traces that a deep one is worked out from: a first and a last one, which differ, and others."""
FOUR = 4
"""Layers of which a quarter, a half and three quarters are whole ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A run's memory by its own account."""

    phases: dict[str, int]
    """Bytes that torch's allocator will have handed out at the peak of each phase."""
    components: dict[str, dict[str, int]] = field(default_factory=dict)
    """The same by owner, where the trace went through every layer."""
    least_bytes: int | None = None
    """The least that the allocator must be given, with expandable segments; None where layers were extrapolated."""
    graphs_bytes: int = 0
    """What the allocator reserves for captured graphs: part of the least, and of no phase's peak."""
    host_bytes: int = 0
    """Buffers in host memory."""

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())


def predict(config: Config, model: str, target: TracedTarget, *, mix: Mix = "fullest") -> Prediction:
    """By a trace through every layer: about ten seconds for a model of 7B. The config is settled."""
    found = trace_step(config, architecture_of(model), target, critic=_critic_of(config), mix=mix)
    events = found.trace.events
    # Of what follows, only the allocated bytes know that layers are compiled.
    saved = _compiled(config, model)
    peaks = {phase: peak.allocated for phase, peak in replay(events).items() if phase}
    return Prediction(
        phases={phase: peak - saved.get(phase, 0) for phase, peak in peaks.items()},
        components={phase: found.trace.components(phase) for phase in peaks},
        least_bytes=least_capacity(events) - max(saved.values(), default=0),
        graphs_bytes=graphs_bytes(events),
        host_bytes=found.host_bytes,
    )


def predict_shallow(config: Config, model: str, target: TracedTarget, *, mix: Mix = "fullest") -> Prediction:
    """By traces of a few layers, and the lines through them: about two seconds, whatever the depth."""
    architecture, critic = architecture_of(model), _critic_of(config)
    layers, depths = _depth(architecture), _depths(config)
    if depths is None or layers <= max(depths) or (critic is not None and _depth(critic) != layers):
        return predict(config, model, target, mix=mix)
    low, high = (
        trace_step(
            config, with_layers(architecture, depth), target, critic=critic and with_layers(critic, depth), mix=mix
        )
        for depth in depths
    )

    def at_depth(first: int, second: int) -> int:
        return first + (second - first) * (layers - depths[0]) // (depths[1] - depths[0])

    lendable, cache = (at_depth(getattr(low, name), getattr(high, name)) for name in ("lendable_bytes", "cache_bytes"))
    if {low.lends, high.lends} != {cache <= lendable}:  # a step in what is otherwise a line
        return predict(config, model, target, mix=mix)
    peaks = extrapolate(dict(zip(depths, (low.trace.events, high.trace.events), strict=True)), layers)
    saved = _compiled(config, model)
    return Prediction(
        phases={phase: peak - saved.get(phase, 0) for phase, peak in peaks.items() if phase},
        graphs_bytes=graphs_bytes(high.trace.events),  # one layer's temporaries and the head's, whatever the depth
        host_bytes=at_depth(low.host_bytes, high.host_bytes),
    )


class TracedStep(NamedTuple):
    """A step of a run, traced."""

    trace: trace.Trace
    host_bytes: int
    """Of its host buffers."""
    lendable_bytes: int
    """Of the gradients' memory that a KV cache could lie in."""
    cache_bytes: int

    @property
    def lends(self) -> bool:
        return self.cache_bytes <= self.lendable_bytes


def trace_step(
    config: Config,
    architecture: PretrainedConfig,
    target: TracedTarget,
    *,
    critic: PretrainedConfig | None = None,
    mix: Mix = "fullest",
) -> TracedStep:
    """What a step of the run allocates."""
    for key in ("memory.compile", "memory.liger"):  # kernels that are made, or run, on a GPU alone
        config = with_key(config, key, False)
    gc.collect()  # of an earlier trace nothing may be left
    before = hollow_bytes()
    host = lendable = cache = 0

    def step(mark: trace.Phase) -> None:
        nonlocal host, lendable, cache
        phase = _marked(mark)
        run = Rehearsal(
            config,
            architecture,
            target,
            phase,
            critic_architecture=critic,
            samples=False,
            mix=mix,
            capture=TracedCapture(mark),
        )
        _name_owners(mark, run)
        for optimizer in run.optimizers:
            _shorten(optimizer)
        if run.engine is not None:
            _enter_passes_apart(mark, run.engine.decoder)
        run.step()
        host = hollow_bytes() - before
        lent = run.actor.optimizer.lendable
        lendable = 0 if lent is None else lent.nbytes
        cache = 0 if run.engine is None else run.engine.pages.arena.nbytes

    return TracedStep(record_phases(step), host, lendable, cache)


def architecture_of(model: str) -> PretrainedConfig:
    """The Hugging Face config of a folder, a file or a Hub id that is here, or of a shape that the planner knows."""
    if not (Path(model).expanduser().exists() or model in PACKAGED):
        with suppress(ModelError):
            return from_shape(find_shape(model))
    source = source_of(model, weights=False)
    found = guard(model, lambda: AutoConfig.from_pretrained(**source))
    assert isinstance(found, PretrainedConfig), "what the factory makes"
    return found


def from_shape(shape: Shape) -> PretrainedConfig:
    """A dense architecture with these numbers; `ModelError` for others, whose config.json is needed."""
    if shape.experts or shape.kv_lora_rank or shape.sliding_window:
        raise ModelError(
            f"{shape.name}: experts, latent attention and windows are traced from the model's own config.json",
            "give its folder",
        )
    kind = "qwen3" if shape.qk_norm else "qwen2" if shape.attention_bias else "llama"
    numbers: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
    }
    made = AutoConfig.for_model(kind, **numbers)
    assert isinstance(made, PretrainedConfig), "what the factory makes"
    return made


def with_layers(architecture: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The same with another depth."""
    numbers = architecture.to_dict()
    numbers["num_hidden_layers"] = layers
    if numbers.get("layer_types"):
        numbers["layer_types"] = [*islice(cycle(numbers["layer_types"]), layers)]
    made = type(architecture).from_dict(numbers)
    assert isinstance(made, PretrainedConfig), "of the same kind"
    return made


def _compiled(config: Config, model: str) -> dict[str, int]:
    """What compiled layers keep less, by phase: by a formula fitted to measurements, since no trace sees it."""
    if not config.memory.compile:
        return {}
    shape = find_shape(model)
    eager, compiled = (
        {phase.name: phase.allocated_bytes for phase in Layout(shape, with_key(config, "memory.compile", on)).phases()}
        for on in (False, True)
    )
    return {name: max(0, size - compiled[name]) for name, size in eager.items() if name in ("update", "update_critic")}


def _depths(config: Config) -> tuple[int, int] | None:
    """Depths that a deep model can be worked out from; None where levers take a share of the layers that none has.

    Of large activations that leave, the few that are still here say little about how many would be here in a deep one.
    """
    chosen = choices_of(config)
    leaves, share = chosen.activation_offload != "none", chosen.recomputed_share
    if (leaves and (chosen.activation_share < 1 or share < 1)) or (share * FOUR) % 1:
        return None
    return SHALLOW if share in (0, 1) else (FOUR, 2 * FOUR)


def _depth(architecture: PretrainedConfig) -> int:
    layers: int = architecture.get_text_config().num_hidden_layers
    return layers


def _critic_of(config: Config) -> PretrainedConfig | None:
    path = config.critic.model.path
    return architecture_of(path) if path else None


def _marked(mark: trace.Phase) -> Callable[[str], Any]:
    """Phases as the roles open them: one inside another pauses it."""
    open_phases = [""]

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        open_phases.append(name)
        mark(name)
        try:
            yield
        finally:
            open_phases.pop()
            mark(open_phases[-1])

    return phase


def _name_owners(mark: trace.Phase, run: Rehearsal) -> None:
    for optimizer in run.optimizers:
        for component, tensors in optimizer.owned().items():
            mark.own(component, tensors)
    weights: list[Tensor] = [*run.actor.model.module.parameters()]
    if run.critic is not None:
        weights += [*run.critic.model.trunk.module.parameters(), run.critic.model.weight, run.critic.model.bias]
    if run.reference is not None:
        weights += run.reference.model.module.parameters()
    mark.own("weights", weights)
    if run.engine is not None and not run.engine.is_lent:
        mark.own("kv_cache", [run.engine.pages.arena])


def _enter_passes_apart(mark: trace.Phase, decoder: Decoder) -> None:
    """Depths are compared part by part: a pass over prompts is one."""
    prefill = decoder._prefill

    def one_pass(texts: list[Text]) -> Sequence[Tensor]:
        mark.again()
        found = prefill(texts)
        mark.again()
        return found

    decoder._prefill = one_pass  # type: ignore[method-assign]


def _shorten(optimizer: Optimizer) -> None:
    """Step one piece of every size: the others allocate the same, and there are thousands."""
    placement = optimizer._placement
    run = placement.run

    def run_some(step: Callable[[Piece, Tensor, Tensor, Mapping[str, Tensor]], None]) -> None:
        seen: set[int] = set()

        def step_some(piece: Piece, weights: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
            if len(gradient) not in seen:
                seen.add(len(gradient))
                step(piece, weights, gradient, state)

        run(step_some)

    placement.run = run_some  # type: ignore[method-assign]
