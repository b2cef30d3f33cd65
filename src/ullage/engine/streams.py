"""Copies beside the computation: pinned host memory and side streams on CUDA, plain memory and no streams elsewhere.

The only file of the update that knows CUDA's streams and pinning, so that a tracer can log what goes through here.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ullage.base.errors import DoesNotFitError


class Mark:
    """A point in a queue of device work; without an event it has always been passed."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Nothing launched on the stream later runs before this point has been passed; the host goes on."""
        if self._event is not None:
            stream.wait_event(self._event)

    def wait(self) -> None:
        """The host waits until this point has been passed."""
        if self._event is not None:
            self._event.synchronize()


class SideStream:
    """A queue of copies that runs beside the device's main one; on a CPU everything simply happens in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def use(self) -> AbstractContextManager[object]:
        """What is launched inside goes to this queue."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_for(self, mark: Mark) -> None:
        """Nothing launched here later runs before what the mark stands behind."""
        if self._stream is not None:
            mark.hold(self._stream)

    def wait_for_main(self) -> None:
        """Nothing launched here later runs before what the main queue holds now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def hold_main(self, mark: Mark) -> None:
        """Nothing launched on the main queue later runs before what the mark stands behind."""
        if self._stream is not None:
            mark.hold(torch.cuda.current_stream(self._device))

    def mark(self) -> Mark:
        """The end of this queue as it is now."""
        return Mark(None if self._stream is None else self._stream.record_event())

    def keep_until_done(self, tensor: Tensor) -> None:
        """The allocator must not give the tensor's memory away before this queue has passed."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


def host_buffer(numel: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = True) -> Tensor:
    """Zeros in host memory, until the last view is gone; pinned, copies to and from the device go at full speed.

    On CUDA the memory is registered rather than taken from torch's pinned pool, which rounds sizes up to a power of two
    and never gives anything back.
    """
    size = numel * dtype.itemsize
    if device.type == "meta":
        # Marked before it has a size: whoever logs the device's memory never takes it for that.
        return mark_hollow(torch.empty(0, dtype=torch.uint8, device=device)).resize_(size).view(dtype)
    if device.type != "cuda" or not pinned or not size:
        return _zeros(size).view(dtype)
    # Whole pages: two registered ranges may not share one.
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    room = _zeros(length + mmap.PAGESIZE)
    offset = -room.data_ptr() % mmap.PAGESIZE
    address = room.data_ptr() + offset
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(address, length, 0))
    if code:
        reason = cudart.cudaGetErrorString(cudart.cudaError(code))
        raise _too_large(f"could not pin {_gib(length)} of host memory: {reason}")
    finalizer = weakref.finalize(room.untyped_storage(), cudart.cudaHostUnregister, address)
    finalizer.atexit = False  # the process takes its memory with it
    return room[offset : offset + size].view(dtype)


HOLLOW: dict[int, weakref.ref[torch.UntypedStorage]] = {}
"""The host memory that a trace pretends to have, by address: a device without bytes has no host beside it either."""


def is_hollow(tensor: Tensor) -> bool:
    return tensor.untyped_storage()._cdata in HOLLOW


def mark_hollow(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    address = storage._cdata
    if address not in HOLLOW:
        HOLLOW[address] = weakref.ref(storage, lambda _: HOLLOW.pop(address))
    return tensor


def hollow_bytes() -> int:
    """Of all that is pretended now."""
    return sum(storage.nbytes() for storage in (found() for found in HOLLOW.values()) if storage is not None)


def _zeros(size: int) -> Tensor:
    try:
        return torch.zeros(size, dtype=torch.uint8)
    except RuntimeError as error:  # torch's CPU allocator has no class of its own for this
        raise _too_large(f"could not allocate {_gib(size)} of host memory") from error


def _too_large(cause: str) -> DoesNotFitError:
    return DoesNotFitError(
        cause,
        "raise the memory limit of the machine or container (and `ulimit -l`, the limit of pinned memory), "
        "or keep more on the device",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
