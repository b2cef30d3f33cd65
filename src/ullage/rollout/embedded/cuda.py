"""What only a CUDA device has: captured graphs, pinned memory, events. Elsewhere copies simply happen in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


class Capture:
    """Turns steps into graphs that are replayed, whose temporaries lie in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        """Of the pool, which nothing else can use while there is a graph."""
        self._device = device
        # One queue for all captures: libraries keep a workspace for each.
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def __call__(self, step: Callable[[], object]) -> Callable[[], None]:
        """What runs the step on the tensors it read and wrote here. The step itself is run once, to warm up."""
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            step()  # kernels are compiled and workspaces made, neither of which can be captured
        main.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may measure memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError:
            self._leave_pool(graph)
            raise
        finally:
            torch.cuda.set_stream(main)  # where it fails, its own queue is left in use
        self.nbytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay

    def _leave_pool(self, graph: torch.cuda.CUDAGraph) -> None:
        """A capture that broke off leaves the allocator filling its pool, unless it could still end it."""
        try:
            graph.pool()
        except RuntimeError:
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(index, self._pool)
                torch._C._cuda_releasePool(index, self._pool)
            self._pool = None

    def forget(self) -> None:
        """The graphs are gone: the next one begins a new pool."""
        self._pool = None
        self.nbytes = 0


class Arriving:
    """A window's tokens and log-probs on their way to the host."""

    def __init__(self, tokens: Tensor, logprobs: Tensor, event: torch.cuda.Event | None) -> None:
        self._tokens, self._logprobs, self._event = tokens, logprobs, event

    def read(self) -> tuple[Tensor, Tensor]:
        """Both on the host, when they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens, self._logprobs


class Readback:
    """Copies windows to the host while the device goes on; so many can be on their way at once."""

    def __init__(self, tokens: Tensor, logprobs: Tensor, at_once: int) -> None:
        self._is_cuda = tokens.device.type == "cuda"
        self._places = [
            tuple(torch.zeros(part.shape, dtype=part.dtype, pin_memory=self._is_cuda) for part in (tokens, logprobs))
            for _ in range(at_once)
        ]
        self._next = 0

    def send(self, tokens: Tensor, logprobs: Tensor) -> Arriving:
        place = self._places[self._next]
        self._next = (self._next + 1) % len(self._places)
        arriving = [
            there[: len(part)].copy_(part, non_blocking=True)
            for there, part in zip(place, (tokens, logprobs), strict=True)
        ]
        event = None
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
        return Arriving(arriving[0], arriving[1], event)
