"""Decoder layers that keep what matrix products and attention made, and make the cheap rest again when it is needed.

Norms, activations and gated products are functions of tensors that are kept anyway: autograd holds a recipe in place of
what it would save of them. Nobody looks at single operators, so the host has next to nothing more to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ullage.engine.gated import plain_product, set_product
from ullage.engine.offload import OffloadedForward, SynchronizedGroupOffloadHandler, Tag
from ullage.engine.saved_storage import Kept, storage_identity

Make = Callable[..., Tensor]


class RemadeForward:
    """The forward of a layer with a gated MLP, whose norms, activation and gated product are made again."""

    def __init__(self, plain: Callable[..., Any], layer: torch.nn.Module) -> None:
        update_wrapper(self, plain, updated=())
        self.plain = plain
        self.layer = layer
        self.recipes: _Recipes | None = None
        """Of the pass that is running."""
        self._norms = [part for part in layer.modules() if _is_norm(part)]
        for norm in self._norms:
            norm.forward = _RemadeNorm(norm.forward, self)
        set_product(layer, self._product)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        outside = self.layer.forward
        self.recipes = recipes = _Recipes(outside.handler if isinstance(outside, OffloadedForward) else None)
        try:
            with saved_tensors_hooks(recipes.pack, _Recipes.unpack):
                return self.plain(*args, **kwargs)
        finally:
            self.recipes = None

    def undo(self) -> Callable[..., Any]:
        """Leave the layer as it was; returns its own forward."""
        for norm in self._norms:
            del norm.forward
        set_product(self.layer, None)
        return self.plain

    def _product(self, activation: Make, gate: Tensor, up: Tensor) -> Tensor:
        if self.recipes is None:
            return plain_product(activation, gate, up)
        active = activation(gate)
        self.recipes.add(active, _Recipe(activation, [self.recipes.pack(gate)]))
        product = active * up
        self.recipes.add(product, _Recipe(torch.mul, [self.recipes.pack(active), self.recipes.pack(up)]))
        return product


def _is_norm(part: torch.nn.Module) -> bool:
    """One that computes as its class says, all by itself."""
    return type(part).__name__.endswith("Norm") and not list(part.children()) and "forward" not in vars(part)


class _RemadeNorm:
    """A norm's forward of which its input is kept."""

    def __init__(self, plain: Make, whole: RemadeForward) -> None:
        self.plain = plain
        self.whole = whole

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:  # noqa: ANN401
        recipes = self.whole.recipes
        if recipes is None or len(inputs) != 1 or named or not torch.is_grad_enabled():
            return self.plain(*inputs, **named)
        (x,) = inputs
        recipe = _NormRecipe(self.plain, [recipes.pack(x)], under_gradients=x.requires_grad)
        with saved_tensors_hooks(recipe.pack, _Recipes.unpack):
            made = self.plain(x)
        recipes.add(made, recipe)
        return made


class _Held(Protocol):
    """A tensor until its backward pass, wherever it is."""

    def tensor(self) -> Tensor: ...


class _Recipes:
    """What a layer's pass can make again, by the storage of what it made."""

    def __init__(self, handler: SynchronizedGroupOffloadHandler | None) -> None:
        """`handler`: of the offload around it, whose hooks these replace."""
        self._handler = handler
        self._recipes: dict[int, _Recipe] = {}

    def add(self, made: Tensor, recipe: _Recipe) -> None:
        recipe.stands_for(made)
        self._recipes[storage_identity(made)] = recipe

    def pack(self, tensor: Tensor) -> _Held:
        """What autograd, or a recipe, holds in place of a tensor."""
        recipe = self._recipes.get(storage_identity(tensor))
        if recipe is not None and recipe.makes(tensor):
            recipe.uses += 1
            return _Again(recipe, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        if self._handler is not None:
            return _Offloaded(self._handler, self._handler.tensor_push(tensor))
        tensor = tensor.detach()  # an output that kept its own graph alive would never be freed
        return Kept(tensor, tensor._version)

    @staticmethod
    def unpack(held: _Held) -> Tensor:
        return held.tensor()


class _Recipe:
    """How to make a tensor again, until it has been used for the last time."""

    def __init__(self, make: Make, inputs: list[_Held]) -> None:
        self.uses = 0
        """Of the result, to come."""
        self._make = make
        self._inputs = inputs
        self._result: Tensor | None = None

    def stands_for(self, made: Tensor) -> None:
        self._dtype, self._version = made.dtype, made._version
        # As long as this lives, no other storage can have the same identity.
        self._origin = StorageWeakRef(made.untyped_storage())

    def makes(self, tensor: Tensor) -> bool:
        """Not if it was changed since."""
        return (tensor.dtype, tensor._version) == (self._dtype, self._version)

    def use(self) -> Tensor:
        """The result, which is freed with its last use."""
        assert self.uses > 0, "a backward pass runs once: what it needs is freed on the way"
        result = self._made()
        self.uses -= 1
        if not self.uses:
            self._result = None
            self._inputs = []
        return result

    def _made(self) -> Tensor:
        if self._result is None:
            self._result = self._make(*(held.tensor() for held in self._inputs))
        return self._result


class _NormRecipe(_Recipe):
    """Of a norm, with what autograd saved inside it, in order."""

    def __init__(self, make: Make, inputs: list[_Held], *, under_gradients: bool) -> None:
        super().__init__(make, inputs)
        self._under_gradients = under_gradients
        self._count = 0
        self._inside: list[Tensor | None] = []

    def pack(self, tensor: Tensor) -> _Inside:
        del tensor
        self._count += 1
        self.uses += 1
        return _Inside(self, self._count - 1)

    def use_inside(self, index: int) -> Tensor:
        self._made()
        tensor, self._inside[index] = self._inside[index], None
        assert tensor is not None, "used once"
        self.use()
        return tensor

    def _made(self) -> Tensor:
        if self._result is None:
            (held,) = self._inputs
            x = held.tensor().detach().requires_grad_(self._under_gradients)
            inside = self._inside = []
            with torch.enable_grad(), saved_tensors_hooks(lambda saved: inside.append(saved.detach()), _unused):
                self._result = self._make(x).detach()
            assert len(inside) == self._count, "a norm saves the same each time"
        return self._result


def _unused(_: None) -> Tensor:
    raise AssertionError("nothing goes back through what is made again")


class _Again:
    """A view of what a recipe makes."""

    __slots__ = ("_offset", "_recipe", "_size", "_stride")

    def __init__(self, recipe: _Recipe, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self._recipe, self._size, self._stride, self._offset = recipe, size, stride, offset

    def tensor(self) -> Tensor:
        return self._recipe.use().as_strided(self._size, self._stride, self._offset)


class _Inside:
    """One of the tensors that autograd saved inside a norm."""

    __slots__ = ("_index", "_recipe")

    def __init__(self, recipe: _NormRecipe, index: int) -> None:
        self._recipe, self._index = recipe, index

    def tensor(self) -> Tensor:
        return self._recipe.use_inside(self._index)


class _Offloaded:
    """What an offload has taken over."""

    __slots__ = ("_handler", "_tag")

    def __init__(self, handler: SynchronizedGroupOffloadHandler, tag: Tag) -> None:
        self._handler, self._tag = handler, tag

    def tensor(self) -> Tensor:
        return self._handler.tensor_pop(self._tag)
