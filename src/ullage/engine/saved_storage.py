"""What autograd saved and gets back unchanged: storages on the device or in host memory, and the tensors in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ullage.engine.streams import Mark, SideStream, host_buffer

ALIGNMENT = 512
"""Bytes; where a tensor starts in host memory."""


class HostMemory:
    """Slabs of host memory, allocated when there is none left and then kept, so that passes after the first reuse them.

    A tensor may lie in several slabs: any mix of sizes fills them without gaps. A slab is free when all in it are.
    """

    def __init__(self, device: torch.device, slab_bytes: int) -> None:
        assert slab_bytes % ALIGNMENT == 0, "pieces start aligned"
        self.device = device
        self.slab_bytes = slab_bytes
        self.num_slabs = 0
        self._free: list[_Slab] = []
        self._open = _Slab(torch.empty(0, dtype=torch.uint8), used=slab_bytes)
        """The one being filled; there is none before the first is needed."""

    @property
    def held_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    def take(self, num_bytes: int) -> list[_Piece]:
        """Pieces of this many bytes in all."""
        while num_bytes > self.slab_bytes - self._open.used + len(self._free) * self.slab_bytes:
            self._free.append(_Slab(host_buffer(self.slab_bytes, torch.uint8, self.device)))
            self.num_slabs += 1
        pieces = []
        while num_bytes:
            if self._open.used == self.slab_bytes:
                self._open = self._free.pop()
            slab = self._open
            taken = min(num_bytes, self.slab_bytes - slab.used)
            pieces.append(_Piece(slab, slab.memory[slab.used : slab.used + taken]))
            slab.used += -(-taken // ALIGNMENT) * ALIGNMENT
            slab.live += 1
            num_bytes -= taken
        return pieces

    def give_back(self, pieces: list[_Piece]) -> None:
        for piece in pieces:
            slab = piece.slab
            slab.live -= 1
            if slab.live == 0:
                slab.used = 0
                if slab is not self._open:
                    self._free.append(slab)


@dataclass(slots=True, eq=False)
class _Slab:
    memory: Tensor
    used: int = 0
    live: int = 0
    """Pieces not given back."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    slab: _Slab
    memory: Tensor


class Move:
    """Copies that a side stream has been given, up to now."""

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        self._mark: Mark | None = stream.mark()

    def wait(self) -> None:
        """What the computation launches from here on comes after them."""
        if self._mark is not None:
            self._stream.hold_main(self._mark)
            self._mark = None


class Stored:
    """A storage that autograd needs again: on the device, on the host or, with a move, on its way."""

    def __init__(self, tensor: Tensor, memory: HostMemory) -> None:
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self.move: Move | None = None
        self._tensor: Tensor | None = tensor
        self._version = tensor._version
        self._device = tensor.device
        self._memory = memory
        self._pieces: list[_Piece] = []
        self._stays = False
        self._changed = False
        # As long as this lives, no other storage can have the same identity.
        self._origin = StorageWeakRef(storage)

    @property
    def has_left(self) -> bool:
        """It has been copied to the host, whether it is still on the device or not."""
        return bool(self._pieces)

    @property
    def away(self) -> bool:
        return self._tensor is None

    def stay(self, tensor: Tensor) -> None:
        """A group that does not leave needs it too."""
        if not self._stays:
            self._stays = True
            self._tensor, self._version = tensor, tensor._version

    def copy_out(self) -> None:
        assert self._tensor is not None, "it leaves once"
        self._changed = self._tensor._version != self._version  # an error only if it is used again, as in autograd
        flat = _flat(self._tensor)
        self._pieces = self._memory.take(self.num_bytes)
        start = 0
        for piece in self._pieces:
            piece.memory.copy_(flat[start : start + len(piece.memory)], non_blocking=True)
            start += len(piece.memory)

    def leave(self) -> None:
        """Free the device's memory once the copy is through."""
        self._settle()
        if not self._stays:
            self._tensor = None

    def copy_in(self, flat: Tensor) -> None:
        start = 0
        for piece in self._pieces:
            flat[start : start + len(piece.memory)].copy_(piece.memory, non_blocking=True)
            start += len(piece.memory)
        self._tensor, self._version = flat, flat._version

    def on_device(self) -> Tensor:
        """Some tensor of the storage, ready for the computation's queue."""
        if self._tensor is None:
            self.copy_in(torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device))
        assert self._tensor is not None, "copied in"
        self._settle()
        _check(not self._changed and self._tensor._version == self._version)
        return self._tensor

    def _settle(self) -> None:
        if self.move is not None:
            self.move.wait()
            self.move = None

    def __del__(self) -> None:
        # A pass broken off frees memory that a copy may still use: what reuses it comes after the wait.
        self._settle()
        self._memory.give_back(self._pieces)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A tensor that stays where it is."""

    kept: Tensor
    version: int

    def tensor(self) -> Tensor:
        _check(self.kept._version == self.version)
        return self.kept


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """How a tensor lies in its storage."""

    stored: Stored
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        storage = self.stored.on_device().untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def storage_identity(tensor: Tensor) -> int:
    """The same for all views, and for no other storage as long as one is referred to, if only weakly."""
    return tensor.untyped_storage()._cdata


def _flat(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _check(unchanged: bool) -> None:
    """Autograd does not check what hooks have saved."""
    if not unchanged:
        raise RuntimeError("a tensor needed for the backward pass has been changed in place")
