"""Activation offload: what autograd saves inside decoder layers waits in host memory for its backward pass.

The layers form groups. What a group saves leaves after its forward pass and comes back before its backward pass. The
last groups are needed at once, so they are the last to be chosen. Moved is the storage, once for all views and groups
that share it. Autograd holds a tag instead; with the last tag of a storage its memory on both sides is free again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ullage.base.errors import ConfigError
from ullage.engine.saved_storage import HostMemory, Kept, Move, Stored, View, storage_identity
from ullage.engine.streams import SideStream

MIN_BYTES = 1 << 20
"""A copy of less costs more than its bytes are worth."""
SLAB_BYTES = 64 << 20


class SynchronizedGroupOffloadHandler:
    """Copies a tensor when it is saved and again when it is needed, in the queue of the computation itself."""

    def __init__(
        self,
        num_offload_group: int,
        num_model_group: int | None = None,
        *,
        device: torch.device | str | None = None,
        min_bytes: int = MIN_BYTES,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """`num_offload_group` of `num_model_group` groups leave, here the first; with no number a layer is a group."""
        assert num_offload_group >= 0, "a number of groups"
        assert num_model_group is None or num_offload_group <= num_model_group, "no more groups than there are"
        self.num_offload_group = num_offload_group
        self.num_model_group = num_model_group
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.min_bytes = min_bytes
        self.memory = HostMemory(self.device, slab_bytes)
        self.saved_bytes = 0
        """What autograd saved in the layers of the last pass, without weights and small tensors."""
        self.offloaded_bytes = 0
        """The part of it that left."""
        self._groups = [_Group(0, None)]
        self._weights: frozenset[int] = frozenset()
        self._known: weakref.WeakValueDictionary[tuple[int, int], Stored] = weakref.WeakValueDictionary()

    @property
    def current_group(self) -> int:
        """The group whose forward pass is running."""
        return self._groups[-1].index

    @property
    def host_bytes(self) -> int:
        """Host memory held, in use or not."""
        return self.memory.held_bytes

    def reset(self) -> None:
        """Forget a pass that was broken off. What its graph holds is freed with the graph."""
        self._groups = [_Group(0, None)]

    def start_forward(self) -> None:
        """The first layer of a pass begins."""
        self.reset()
        self.saved_bytes = self.offloaded_bytes = 0

    @contextmanager
    def saving(self, layer: torch.nn.Module) -> Iterator[None]:
        """Take over what autograd saves in this layer, except its weights."""
        held = (*layer.parameters(), *layer.buffers())
        self._weights = frozenset(storage_identity(tensor) for tensor in held)
        with saved_tensors_hooks(self.tensor_push, self.tensor_pop):
            yield

    def on_group_commit_forward(self) -> None:
        """The last layer of the group is through."""
        done = self._groups[-1]
        self._groups.append(_Group(done.index + 1, done if self._leaves(done.index) else done.before))

    def finish_forward(self) -> None:
        """The last layer of the pass is through."""

    def tensor_push(self, tensor: Tensor, **_: Any) -> Tag:  # noqa: ANN401 -- other frameworks pass more
        """Take a tensor that autograd saves."""
        tensor = tensor.detach()  # an output that kept its own graph alive would never be freed
        group = self._groups[-1]
        if not self._movable(tensor):
            return Tag(group, Kept(tensor, tensor._version))
        key = (storage_identity(tensor), tensor._version)
        stored = self._known.get(key)
        if stored is None:
            stored = self._known[key] = Stored(tensor, self.memory)
            self.saved_bytes += stored.num_bytes
        if self._leaves(group.index):
            self._take(stored)
        else:
            stored.stay(tensor)
        return Tag(group, View(stored, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()))

    def tensor_pop(self, tag: Tag) -> Tensor:
        """Give it back for its backward pass."""
        return tag.saved.tensor()

    def _leaves(self, group: int) -> bool:
        return group < self.num_offload_group

    def _take(self, stored: Stored) -> None:
        if not stored.has_left:
            self._copy_out(stored)
            stored.leave()

    def _copy_out(self, stored: Stored) -> None:
        stored.copy_out()
        self.offloaded_bytes += stored.num_bytes

    def _movable(self, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
        return (
            plain
            and tensor.device.type == self.device.type
            and tensor.untyped_storage().nbytes() >= self.min_bytes
            and storage_identity(tensor) not in self._weights
        )


class AsyncDoubleBufferGroupOffloadHandler(SynchronizedGroupOffloadHandler):
    """Copies whole groups beside the computation.

    A group leaves while those behind it compute, until the next one that leaves is through: of all that leave, at most
    two are on the device. In the backward pass it returns in the same time.
    """

    def __init__(
        self,
        num_offload_group: int,
        num_model_group: int,
        *,
        device: torch.device | str | None = None,
        min_bytes: int = MIN_BYTES,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        super().__init__(num_offload_group, num_model_group, device=device, min_bytes=min_bytes, slab_bytes=slab_bytes)
        self.d2h_stream = SideStream(self.device)
        self.h2d_stream = SideStream(self.device)
        self._leaving: list[Stored] = []
        self._distance = -(-(num_model_group - 1) // max(num_offload_group, 1))

    def reset(self) -> None:
        self._let_go()
        super().reset()

    def on_group_commit_forward(self) -> None:
        if self._leaves(self.current_group):
            self._let_go()
            self.bulk_offload_group(self.current_group)
        super().on_group_commit_forward()

    def finish_forward(self) -> None:
        self._let_go()

    def bulk_offload_group(self, group_to_offload: int) -> None:
        """Start the copies of everything that a group of this pass saved."""
        leaving = [stored for stored in self._groups[group_to_offload].present() if not stored.has_left]
        self.d2h_stream.wait_for_main()
        try:
            with self.d2h_stream.use():
                for stored in leaving:
                    self._copy_out(stored)
        finally:  # the host may have no memory left for the rest
            move = Move(self.d2h_stream)
            for stored in leaving:
                stored.move = move
        self._leaving += leaving

    def tensor_pop(self, tag: Tag) -> Tensor:
        if not tag.group.used:
            self._prepare(tag.group)
        return super().tensor_pop(tag)

    def _prepare(self, group: _Group) -> None:
        """The group's backward pass begins: it must be there, and the one before it on its way."""
        group.used = True
        self._reload(group)
        # When the last group begins nothing is free yet: only one that is needed next returns then.
        distance = 1 if group.index + 1 == self.num_model_group else self._distance
        if group.before is not None and group.index - group.before.index <= distance:
            self._reload(group.before)

    def _leaves(self, group: int) -> bool:
        """Spread evenly over all groups but the last, so that each copy has the time of several to hide behind."""
        assert self.num_model_group is not None, "always given"
        others = self.num_model_group - 1
        if self.num_offload_group > others:
            return True
        return group < others and group * self.num_offload_group % others < self.num_offload_group

    def _take(self, stored: Stored) -> None:
        self._groups[-1].members.append(weakref.ref(stored))

    def _let_go(self) -> None:
        """Free what has been copied. The computation's queue waits for the copies, so no bytes pile up behind them."""
        for stored in self._leaving:
            stored.leave()
        self._leaving = []

    def _reload(self, group: _Group) -> None:
        """Start the copies back, once."""
        if group.returns:
            return
        away = [stored for stored in group.present() if stored.away]
        # Memory of the computation's own queue: only there is it in order with what is freed and used later.
        room = [torch.empty(stored.num_bytes, dtype=torch.uint8, device=self.device) for stored in away]
        self.h2d_stream.wait_for_main()
        with self.h2d_stream.use():
            for stored, memory in zip(away, room, strict=True):
                stored.copy_in(memory)
        move = Move(self.h2d_stream)
        for stored in away:
            stored.move = move
        group.returns = True


def make_handler(
    kind: Literal["sync", "async"],
    *,
    groups: int,
    offloaded: int,
    device: torch.device,
    min_bytes: int = MIN_BYTES,
) -> SynchronizedGroupOffloadHandler:
    """Offload `offloaded` of `groups` groups of layers, tensors of at least `min_bytes`."""
    handlers = {"sync": SynchronizedGroupOffloadHandler, "async": AsyncDoubleBufferGroupOffloadHandler}
    return handlers[kind](offloaded, groups, device=device, min_bytes=min_bytes)


def offload_activations(layers: Sequence[torch.nn.Module], handler: SynchronizedGroupOffloadHandler) -> None:
    """Let the handler keep what these layers, the decoder layers of a model in order, save for the backward pass.

    The last call counts, so roles that share a module can each ask; models can share a handler and its host memory.
    """
    groups = handler.num_model_group or len(layers)
    if groups > len(layers):
        raise ConfigError(
            f"{groups} groups of activations to offload, but the model has {len(layers)} layers",
            f"choose at most {len(layers)} groups",
        )
    group = [index * groups // len(layers) for index in range(len(layers))]
    for index, layer in enumerate(layers):
        forward = layer.forward.forward if isinstance(layer.forward, OffloadedForward) else layer.forward
        last = index == len(layers) - 1
        place = _Place(first=index == 0, ends_group=last or group[index] != group[index + 1], last=last)
        layer.forward = OffloadedForward(forward, layer, handler, place)


class OffloadedForward:
    """A layer's forward whose saved tensors go to a handler."""

    def __init__(
        self,
        forward: Callable[..., Any],
        layer: torch.nn.Module,
        handler: SynchronizedGroupOffloadHandler,
        place: _Place,
    ) -> None:
        update_wrapper(self, forward, updated=())
        self.forward = forward
        self.layer = layer
        self.handler = handler
        self.place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.place.first:
            self.handler.start_forward()
        with self.handler.saving(self.layer):
            out = self.forward(*args, **kwargs)
        if self.place.ends_group:
            self.handler.on_group_commit_forward()
        if self.place.last:
            self.handler.finish_forward()
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a layer stands."""

    first: bool
    ends_group: bool
    last: bool


class _Group:
    """Consecutive layers of one pass, and the last group before them that leaves."""

    __slots__ = ("before", "index", "members", "returns", "used")

    def __init__(self, index: int, before: _Group | None) -> None:
        self.index = index
        self.before = before
        self.members: list[weakref.ref[Stored]] = []
        self.returns = False
        """Its copies back have started."""
        self.used = False
        """Its backward pass has started."""

    def present(self) -> list[Stored]:
        """What it saved and autograd still holds, each once."""
        return list(dict.fromkeys(stored for member in self.members if (stored := member()) is not None))


@dataclass(frozen=True, slots=True, eq=False)
class Tag:
    """What autograd holds in place of a saved tensor."""

    group: _Group
    saved: Kept | View
