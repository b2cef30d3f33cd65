"""Records what code allocates and frees, by running it on fake tensors: shapes and lifetimes without the memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ullage.planner.allocator import Owner
from ullage.planner.replay import Allocate, Empty, Enter, Event, Release

CUBLAS_WORKSPACE_BYTES = (32 * 2**20, 2**20)
"""Hopper's cuBLAS and cuBLASLt, for each queue of each thread that multiplies matrices."""
CUBLAS_THREADS = 2
"""The caller's and autograd's."""


@dataclass(slots=True)
class Trace:
    """What happened, in order, and who owns the storages that were named."""

    events: list[Event] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    """Storage key to component; a storage without an owner is a temporary or an activation."""

    def components(self, phase: str) -> dict[str, int]:
        """Bytes by component when the phase's tensors are at their most; storages nobody owns are `activations`."""
        live: dict[int, int] = {}
        total = peak = 0
        inside = False
        at_peak: dict[str, int] = {}
        for event in self.events:
            if isinstance(event, Enter):
                inside = event.phase == phase
            elif isinstance(event, Allocate):
                live[event.key] = event.size
                total += event.size
            elif isinstance(event, Release):
                total -= live.pop(event.key)
            if inside and total > peak:
                peak = total
                at_peak = self._by_owner(live)
        return at_peak

    def _by_owner(self, live: dict[int, int]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for key, size in live.items():
            owner = self.owners.get(key, "activations")
            sums[owner] = sums.get(owner, 0) + size
        return sums


class Phase:
    """Handed to the traced code, which says with it which phase begins and who owns what."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, name: str) -> None:
        self._recorder.trace.events.append(Enter(name))

    def own(self, component: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            key = self._recorder.key_of(tensor.untyped_storage())
            self._recorder.trace.owners[key] = component

    def again(self) -> None:
        """The same phase, entered once more: depths are compared part by part."""
        self._recorder.enter_again()

    def workspace(self, queue: Owner) -> None:
        """Libraries keep one for each queue, from its first product on."""
        self._recorder.add_workspace(queue)

    def empty_cache(self) -> None:
        self._recorder.trace.events.append(Empty())

    @contextmanager
    def on(self, owner: Owner) -> Iterator[None]:
        """What is allocated meanwhile comes from these blocks."""
        before, self._recorder.owner = self._recorder.owner, owner
        try:
            yield
        finally:
            self._recorder.owner = before


def record(step: Callable[[Phase], None]) -> Trace:
    """What `step` allocates and frees when every tensor it makes lives on one CUDA device."""
    with FakeTensorMode():
        return Recorder().run(step)


class Recorder(TorchDispatchMode):
    """Sees the outputs of every operator, and by weak references when their storages die."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.active = True
        self.owner: Owner = "main"
        """Whose blocks are allocated from."""
        self._workspaces = 0
        for _ in range(CUBLAS_THREADS):
            self.add_workspace("main")
        self._live: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}
        self._next_key = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 -- an OpOverload
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 -- whatever the operator returns
        out = self.compute(func, args, kwargs or {})
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor) and self.counts(leaf):
                self.key_of(leaf.untyped_storage())
        return out

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 knows no shape of it; it makes nothing
            return kwargs["out"]
        return func(*args, **kwargs)

    def counts(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory that is traced."""
        del tensor
        return True

    def run(self, step: Callable[[Phase], None]) -> Trace:
        with self, self.seeing_resizes(), self.entering_backward_apart(), flash_attention():
            step(Phase(self))
            self.active = False
        return self.trace

    def key_of(self, storage: UntypedStorage) -> int:
        """The key of a storage in the events; one not seen before is allocated now."""
        address = storage._cdata
        known = self._live.get(address)
        if known is not None:
            return known[0]
        key = self._next_key
        self._next_key += 1
        self.trace.events.append(Allocate(key, storage.nbytes(), self.owner))

        def died(_: object) -> None:
            del self._live[address]
            if self.active:
                self.trace.events.append(Release(key))

        self._live[address] = (key, weakref.ref(storage, died))
        return key

    def add_workspace(self, queue: Owner) -> None:
        for size in CUBLAS_WORKSPACE_BYTES:
            self._workspaces += 1
            self.trace.events.append(Allocate(-self._workspaces, size, queue))
            self.trace.owners[-self._workspaces] = "buffers"

    @contextmanager
    def entering_backward_apart(self) -> Iterator[None]:
        """A phase is entered again where a backward pass begins and ends: depths are compared part by part."""
        plain = Tensor.backward

        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 -- autograd's own
            self.enter_again()
            plain(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
            self.enter_again()

        Tensor.backward = backward  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Tensor.backward = plain  # type: ignore[method-assign]

    def enter_again(self) -> None:
        entered = next((event for event in reversed(self.trace.events) if isinstance(event, Enter)), None)
        if entered is not None:
            self.trace.events.append(entered)

    @contextmanager
    def seeing_resizes(self) -> Iterator[None]:
        """Storages that are emptied and filled again (FSDP's gathered parameters) never pass the dispatcher."""
        plain = UntypedStorage.resize_

        def resize(storage: UntypedStorage, size: int) -> None:
            key = self.key_of(storage)
            before = storage.nbytes()
            plain(storage, size)
            if storage.nbytes() != before:
                self.trace.events += [Release(key), Allocate(key, storage.nbytes(), self.owner)]

        UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            UntypedStorage.resize_ = plain  # type: ignore[method-assign]


@contextmanager
def flash_attention() -> Iterator[None]:
    """A CPU would take another kernel, which keeps other tensors for the backward pass than those of CUDA."""
    plain = functional.scaled_dot_product_attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,  # noqa: ANN401 -- scale and enable_gqa
    ) -> Tensor:
        if attn_mask is not None:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=options.get("scale"))[0]
        return out

    functional.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain
