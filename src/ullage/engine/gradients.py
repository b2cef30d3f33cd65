"""Where gradients are collected: in one flat buffer on the device, in the weights' own dtype or wider, or on the host.

Autograd adds to a parameter's gradient in place. Where the buffer has another dtype or another place, a hook takes each
gradient as soon as a backward pass has produced it, adds it to the buffer and frees it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ullage.engine.streams import Mark, SideStream, host_buffer

CHUNK = 1 << 24
"""Elements whose squares are summed at once."""
ROW = 1 << 14
"""Elements whose squares one thread sums."""


class Gradients:
    """The sum over micro-batches of every parameter's gradient, on the device; `flat` holds one after another."""

    on_host = False

    def __init__(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._parameters = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
        self._hooked = dtype != parameters[0].dtype
        views = views_of(self.flat, parameters)
        if self._hooked:
            _attach(self, parameters, [_adder(view) for view in views])
            return
        for p, view in zip(parameters, views, strict=True):
            p.grad = view

    @property
    def host_nbytes(self) -> int:
        return 0

    def zero(self) -> None:
        if self._hooked:
            _drop(self._parameters)
        self.flat.zero_()

    def settle(self) -> None:
        """Every gradient of the passes so far is in `flat`."""


class HostGradients:
    """Accumulators on the host: a gradient is copied out while the backward pass goes on, and added by a thread."""

    on_host = True

    def __init__(self, parameters: Sequence[Tensor], dtype: torch.dtype, piece: int = 1 << 22) -> None:
        self._parameters = parameters
        device = parameters[0].device
        self.flat = host_buffer(sum(p.numel() for p in parameters), dtype, device)
        self._courier = _Courier(device, parameters[0].dtype, min(piece, max(p.numel() for p in parameters)))
        views = views_of(self.flat, parameters)
        _attach(self, parameters, [_sender(self._courier, view.flatten()) for view in views])
        weakref.finalize(self, self._courier.stop)

    @property
    def host_nbytes(self) -> int:
        return self.flat.nbytes + self._courier.nbytes

    def zero(self) -> None:
        self._courier.wait()
        self._courier.error = None  # of a sum that nobody asked for
        _drop(self._parameters)
        self.flat.zero_()

    def settle(self) -> None:
        """Every gradient of the passes so far is in `flat`; raises what went wrong on the way."""
        self._courier.wait()
        error, self._courier.error = self._courier.error, None
        if error is not None:
            raise error


class _Courier:
    """Takes gradients to the host and adds them there, a few pieces on their way at a time."""

    STAGES = 4

    def __init__(self, device: torch.device, dtype: torch.dtype, piece: int) -> None:
        self.error: BaseException | None = None
        """The first failure of the thread since the last look."""
        self._piece = piece
        self._stream = SideStream(device)
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(self.STAGES):
            self._free.put(host_buffer(piece, dtype, device))
        self.nbytes = self.STAGES * piece * dtype.itemsize
        self._arriving: queue.Queue[tuple[Tensor, Tensor, Mark] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def send(self, gradient: Tensor, accumulator: Tensor) -> None:
        """Add a gradient [n] to an accumulator [n] on the host, soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._add, name="gradients", daemon=True)
            self._thread.start()
        self._stream.wait_for_main()
        self._stream.keep_until_done(gradient)
        parts = zip(gradient.split(self._piece), accumulator.split(self._piece), strict=True)
        for part, target in parts:
            stage = self._free.get()
            with self._stream.use():
                stage[: len(part)].copy_(part, non_blocking=True)
            self._arriving.put((stage, target, self._stream.mark()))

    def wait(self) -> None:
        """Nothing is on its way any more."""
        self._arriving.join()

    def stop(self) -> None:
        self._arriving.put(None)

    def _add(self) -> None:
        while (item := self._arriving.get()) is not None:
            stage, target, arrived = item
            try:
                arrived.wait()
                if self.error is None:
                    target.add_(stage[: len(target)])
            except BaseException as error:  # noqa: BLE001 -- raised where the sum is asked for; a dead thread would hang
                self.error = error
            finally:
                self._free.put(stage)
                self._arriving.task_done()


def global_norm(flat: Tensor) -> float:
    """The 2-norm of all gradients, in float32 or wider, without a wide copy of them."""
    wide = torch.promote_types(flat.dtype, torch.float32)
    if len(flat) <= CHUNK:
        return float(torch.linalg.vector_norm(flat, dtype=wide))
    norms = []
    for part in flat.split(CHUNK):
        # A sum of 10**9 float32 squares would stop growing long before its end.
        rows = part.view(-1, ROW) if len(part) == CHUNK else part.view(1, -1)
        norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=wide))
    return float(torch.linalg.vector_norm(torch.cat(norms).double()))


def views_of(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The flat tensor as one view for each parameter."""
    parts = flat.split([p.numel() for p in parameters])
    return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]


# --- hooks ---

Hook = Callable[[Tensor], None]


def _attach(owner: object, parameters: Sequence[Tensor], hooks: Sequence[Hook]) -> None:
    """The hooks go when their owner does; they must not hold it."""
    for p, hook in zip(parameters, hooks, strict=True):
        p.grad = None
        weakref.finalize(owner, p.register_post_accumulate_grad_hook(hook).remove)


def _adder(view: Tensor) -> Hook:
    def add(p: Tensor) -> None:
        assert p.grad is not None, "just accumulated"
        view.add_(p.grad)
        p.grad = None

    return add


def _sender(courier: _Courier, accumulator: Tensor) -> Hook:
    def send(p: Tensor) -> None:
        assert p.grad is not None, "just accumulated"
        courier.send(p.grad.flatten(), accumulator)
        p.grad = None

    return send


def _drop(parameters: Sequence[Tensor]) -> None:
    """What a failed backward pass left behind would be counted with the next."""
    for p in parameters:
        p.grad = None
