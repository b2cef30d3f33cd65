"""The memory section of the config, pulled: what an optimizer keeps where, and what decoder layers keep at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from ullage.config.settle import choices_of
from ullage.config.tree import Config
from ullage.engine.compiled import compile_layers
from ullage.engine.liger import use_liger
from ullage.engine.offload import SynchronizedGroupOffloadHandler, make_handler, offload_activations
from ullage.engine.optimizer import Levers
from ullage.engine.parking import Ahead, Parked
from ullage.engine.recompute import recompute_layers
from ullage.model.target import Target
from ullage.model.trunk import Trunk
from ullage.workers.passes import Phase


def optimizer_levers(config: Config) -> Levers:
    chosen = choices_of(config)
    return Levers(rounding=config.memory.rounding, state=chosen.optimizer_state, gradients=chosen.gradients)


def prepare_layers(trunk: Trunk, config: Config) -> SynchronizedGroupOffloadHandler | None:
    """Make a trained model's layers compile, recompute and offload as the config says; returns what offloads."""
    memory, chosen, layers = config.memory, choices_of(config), trunk.layers
    if memory.liger:
        use_liger(trunk.module, trunk.target)
    if memory.compile:
        compile_layers(layers)
    share, matmuls = chosen.recomputed_share, chosen.recompute == "matmuls"
    if share and not (matmuls and memory.compile):  # the compiler makes again what is cheap as it is
        recompute_layers(layers, share=share, keep="matmuls" if matmuls else "nothing")
    if chosen.activation_offload == "none":
        return None
    groups = memory.activation_groups or len(layers)
    # The last group is needed again at once: its way out and back would only be waited for.
    leaving = min(round(chosen.activation_share * groups), groups - 1)
    device = trunk.target.device
    handler = make_handler(chosen.activation_offload, groups=groups, offloaded=leaving, device=device)
    offload_activations(layers, handler)
    return handler


def resident_phase(
    phase: Phase,
    names: Iterable[str],
    parameters: Iterable[Tensor],
    config: Config,
    target: Target,
    *,
    trained: bool,
    ahead: Ahead | None = None,
) -> Phase:
    """The named phases of a role; where roles are offloaded, its weights are on the device only inside them."""
    if not choices_of(config).offload_roles:
        return phase
    parked = Parked(parameters, target.device, trained=trained)
    if ahead is not None:
        for name in names:
            ahead.register(name, parked)

    @contextmanager
    def here(name: str) -> Iterator[None]:
        with phase(name), parked.here():
            yield

    return here
