"""Low-rank adapters (LoRA, arXiv:2106.09685) beside the linear layers of a frozen module, which several roles share.

The module's own weights stay the same tensors under the same names: nothing moves, and nothing is merged to run. Each
role has an adapter by name and selects it before its passes; with none selected the module is what it was.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ullage.base.errors import ConfigError, ModelError
from ullage.base.seeds import derive
from ullage.model.quantise import linear, plain_weight

ALL_LINEAR = "all-linear"
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Ranks and scales of an adapter; the patterns are PEFT's, for layers that differ from the rest."""

    rank: int
    alpha: float
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank), not alpha / rank (arXiv:2312.03732)."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, layer: str) -> int:
        return _by_pattern(self.rank_pattern, layer, self.rank)

    def scale_of(self, layer: str) -> float:
        rank, alpha = self.rank_of(layer), _by_pattern(self.alpha_pattern, layer, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


class Pair(NamedTuple):
    """The two factors of one layer's change."""

    down: Tensor
    """[rank, in]"""
    up: Tensor
    """[out, rank]"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What one adapter adds, by the names of the layers: as read from a file, newly made, or to be written."""

    settings: Settings
    layers: Mapping[str, Pair]


class Adapters:
    """All adapters of one module, and which of them is in use."""

    def __init__(self, module: PreTrainedModel, *, wide: bool) -> None:
        """`wide`: sum the thin products in float64."""
        self.module = module
        self.wide = wide
        self.settings: dict[str, Settings] = {}
        self._in_use = _InUse()
        module.requires_grad_(False)

    def select(self, name: str | None) -> None:
        """Use this adapter, or none, until another is selected."""
        self._in_use.name = name

    def attach(self, name: str, adapter: Adapter, dtype: torch.dtype) -> None:
        """Add an adapter and select it."""
        assert name not in self.settings, "each role attaches its own, once"
        layers = linear_layers(self.module)
        for layer in adapter.layers:
            if layer not in layers:
                raise ModelError(
                    f"the adapter changes {layer}, which is no linear layer below the head of this model",
                    "use the model it was made for, and an adapter of its linear layers only",
                )
        # All that stays is made before what passes through host memory: small objects between would hold on to that.
        made = {layer: LowRank(layers[layer], adapter.settings, layer, dtype) for layer in adapter.layers}
        for layer, pair in adapter.layers.items():
            _check_shapes(layer, layers[layer], pair, adapter.settings.rank_of(layer))
            made[layer].fill(pair)
        for layer, low in made.items():
            self._adapted(layer, layers[layer]).adapters[name] = low
        self.settings[name] = adapter.settings
        self.select(name)

    def detached(self, name: str) -> Adapter:
        """The adapter as it is now, to be written."""
        layers = {layer: Pair(low.down.detach(), low.up.detach()) for layer, low in self._layers_of(name)}
        return Adapter(self.settings[name], layers)

    def named_parameters(self, name: str | None) -> Iterator[tuple[str, Tensor]]:
        """What training the adapter changes."""
        for layer, low in self._layers_of(name):
            yield f"{layer}.down", low.down
            yield f"{layer}.up", low.up

    @torch.no_grad()
    def merged_state(self, name: str) -> dict[str, Tensor]:
        """The module's weights with the adapter added in, under the names it had without adapters.

        What was quantised is plain again. The sum is rounded to the model's dtype: in half precision it is close to
        what was trained, not equal to it.
        """
        state, layers = self.module.state_dict(), linear_layers(self.module)
        changes = dict(self._layers_of(name))
        for layer, part in layers.items():
            for inner in part.state_dict():
                if inner.startswith(("adapters.", "weight.")):  # not `weight`, which is a plain one
                    del state[f"{layer}.{inner}"]
            if layer in changes or f"{layer}.weight" not in state:
                weight = plain_weight(part)
                merged = weight.double() + changes[layer].product() if layer in changes else weight
                # To host memory one by one: a second copy of all of them may not fit the device.
                state[f"{layer}.weight"] = merged.to(weight.dtype).cpu()
        return state

    def _adapted(self, layer: str, plain: nn.Linear) -> AdaptedLinear:
        if isinstance(plain, AdaptedLinear):
            return plain
        adapted = AdaptedLinear(plain, self._in_use, wide=self.wide)
        parent, _, leaf = layer.rpartition(".")
        setattr(self.module.get_submodule(parent), leaf, adapted)
        return adapted

    def _parts(self) -> Iterator[tuple[str, AdaptedLinear]]:
        for layer, part in linear_layers(self.module).items():
            if isinstance(part, AdaptedLinear):
                yield layer, part

    def _layers_of(self, name: str | None) -> Iterator[tuple[str, LowRank]]:
        for layer, part in self._parts():
            if name in part.adapters:
                yield layer, part.adapters[name]


@dataclass(slots=True)
class _InUse:
    """Shared by all layers of a module."""

    name: str | None = None


class AdaptedLinear(nn.Linear):
    """A linear layer with its own weight and bias, plain or quantised, plus the change of the adapter in use."""

    def __init__(self, plain: nn.Linear, in_use: _InUse, *, wide: bool) -> None:
        nn.Module.__init__(self)  # not Linear's, which would make weights of its own
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self.adapters: dict[str, LowRank] = nn.ModuleDict()  # type: ignore[assignment]  # a dict, as far as we use it
        self.in_use = in_use
        self.wide = wide
        self.train(plain.training)

    @property
    def change(self) -> LowRank | None:
        """Of the adapter in use."""
        name = self.in_use.name
        return self.adapters[name] if name is not None and name in self.adapters else None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name in torch
        out = linear(input, self.weight, self.bias)
        change = self.change
        if change is None:
            return out
        return out + functional.linear(self.thin(input, change) * change.scale, change.up)

    def thin(self, x: Tensor, change: LowRank) -> Tensor:
        """[..., rank]"""
        low: Tensor = (_WideLinear.apply if self.wide else functional.linear)(x, change.down)
        return low


def drawn_product(x: Tensor, layer: nn.Linear) -> Tensor:
    """A layer's product with [S, in] in a pass without gradients."""
    if not isinstance(layer, AdaptedLinear):
        return layer(x)  # type: ignore[no-any-return]  # a module's call
    return add_change_(linear(x, layer.weight, layer.bias), x, layer)


def add_change_(out: Tensor, x: Tensor, layer: nn.Linear) -> Tensor:
    """What the adapter in use, if any, changes of a layer's product, added to that in place: two kernels.

    The change is rounded once, with the sum, where `forward` rounds every step on the way.
    """
    if isinstance(layer, AdaptedLinear) and (change := layer.change) is not None:
        out.addmm_(layer.thin(x, change), change.up.T, alpha=change.scale)
    return out


class LowRank(nn.Module):
    """One layer's part of one adapter."""

    def __init__(self, plain: nn.Linear, settings: Settings, layer: str, dtype: torch.dtype) -> None:
        super().__init__()
        rank, device = settings.rank_of(layer), plain.weight.device
        self.down = nn.Parameter(torch.empty(rank, plain.in_features, dtype=dtype, device=device))
        self.up = nn.Parameter(torch.empty(plain.out_features, rank, dtype=dtype, device=device))
        self.scale = settings.scale_of(layer)

    @torch.no_grad()
    def fill(self, pair: Pair) -> None:
        self.down.copy_(pair.down)
        self.up.copy_(pair.up)

    def product(self) -> Tensor:
        """[out, in] the change of the weight, in float64."""
        return self.scale * (self.up.double() @ self.down.double())


class _WideLinear(torch.autograd.Function):
    """`x weight^T` for few outputs, summed in float64.

    A CPU's rows of a thin product can round differently with the number of rows around them; in float64 they agree
    before the result is rounded, so packing and batching change nothing. What is kept for the backward pass is the
    input as it came, which layers with the same input share.
    """

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401 -- autograd's own
        context.save_for_backward(x, weight)
        return functional.linear(x.double(), weight.double()).to(x.dtype)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:  # noqa: ANN401
        x, weight = context.saved_tensors
        x_grad = grad @ weight if context.needs_input_grad[0] else None
        return x_grad, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def linear_layers(module: PreTrainedModel) -> dict[str, nn.Linear]:
    """Every linear layer below the output head, by its name in the module. Fused experts are none."""
    trunk = module.base_model
    prefix = "" if trunk is module else f"{module.base_model_prefix}."
    return {prefix + name: layer for name, layer in trunk.named_modules() if isinstance(layer, nn.Linear)}


def new_adapter(module: PreTrainedModel, settings: Settings, targets: Sequence[str], seed: int) -> Adapter:
    """An adapter that changes nothing yet, as PEFT begins: `up` is zero, `down` uniform as in a new linear layer."""
    layers = linear_layers(module)
    chosen = chosen_layers(layers, targets, type(module).__name__)
    return Adapter(settings, _NewLayers({name: layers[name] for name in chosen}, settings, seed))


class _NewLayers(Mapping[str, Pair]):
    """Pairs that are made when they are asked for, the same each time: host memory never holds all of them."""

    def __init__(self, layers: Mapping[str, nn.Linear], settings: Settings, seed: int) -> None:
        self._layers = layers
        self._settings = settings
        self._seed = seed

    def __getitem__(self, layer: str) -> Pair:
        plain, rank = self._layers[layer], self._settings.rank_of(layer)
        down = torch.empty(rank, plain.in_features)
        generator = torch.Generator().manual_seed(derive(self._seed, layer))
        nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
        return Pair(down, torch.zeros(plain.out_features, rank))

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


def chosen_layers(layers: Mapping[str, object], targets: Sequence[str], kind: str) -> list[str]:
    """The layers that `target_modules` means: all, or those whose names end in one of the targets."""
    key = f"actor_rollout_ref.model.target_modules = {list(targets)}"
    if not layers:
        raise ConfigError(f"{key}: {kind} has no plain linear layer", "set lora_rank=0: train its weights instead")
    if ALL_LINEAR in targets:
        return list(layers)
    for target in targets:
        if not any(_ends_in(name, target) for name in layers):
            endings = sorted({name.rpartition(".")[2] for name in layers})
            near = difflib.get_close_matches(target.rpartition(".")[2], endings, n=2)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(
                f"{key}: no linear layer below the head of {kind} is called {target}{meant}",
                f"choose among {', '.join(endings)}, or {ALL_LINEAR}",
            )
    return [name for name in layers if any(_ends_in(name, target) for target in targets)]


def shortest_targets(layers: Mapping[str, object], adapted: Sequence[str]) -> list[str]:
    """Names for `target_modules` that mean just these layers: their last parts where that is enough."""
    endings = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name in layers if any(_ends_in(name, ending) for ending in endings)}
    return sorted(endings) if meant == set(adapted) else sorted(adapted)


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _by_pattern(patterns: Mapping[str, Number], layer: str, default: Number) -> Number:
    """PEFT's rule: the first pattern that is the end of the name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


def _check_shapes(layer: str, plain: nn.Linear, pair: Pair, rank: int) -> None:
    wanted = (plain.in_features, plain.out_features)
    given = (pair.down.shape[1], pair.up.shape[0])
    if wanted != given:
        raise ModelError(
            f"the adapter of {layer} takes {given[0]} numbers to {given[1]}, the layer {wanted[0]} to {wanted[1]}",
            "use the model the adapter was made for",
        )
    if {pair.down.shape[0], pair.up.shape[1]} != {rank}:
        raise ModelError(
            f"the adapter of {layer} has matrices of rank {pair.down.shape[0]} and {pair.up.shape[1]}, and says {rank}",
            "write the adapter again, or its adapter_config.json",
        )
