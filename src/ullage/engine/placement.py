"""Where the optimizer's arithmetic happens: on the device, to which host state is streamed, or on the host's CPU.

Both go through the parameters piece by piece and hand each to the same step, so that results do not depend on it.
Buffers on the way are allocated once. A piece is a range of one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ullage.engine.streams import Mark, SideStream, host_buffer

GRADIENT = "gradient"
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one parameter, flattened, with the gradient and state that belong to it, where they rest."""

    name: str
    parameter: Tensor
    start: int
    """Its first element's place in the parameter."""
    gradient: Tensor
    state: Mapping[str, Tensor]

    @property
    def weights(self) -> Tensor:
        """The range itself; looked up anew, since a role's weights may have been away and come back."""
        return self.parameter.detach().view(-1)[self.start : self.start + len(self.gradient)]


Step = Callable[[Piece, Tensor, Tensor, Mapping[str, Tensor]], None]
"""Changes the weights and state of a piece, given its gradient; these three lie on one device."""


class OnDevice:
    """Steps on the device. What rests on the host comes to one of two stages while the other is stepped, and goes back.

    Args:
        state: the state rests on the host.
        gradient: the gradients rest on the host.
    """

    def __init__(self, device: torch.device, pieces: Sequence[Piece], *, state: bool, gradient: bool) -> None:
        self._pieces = pieces
        self._state, self._gradient = state, gradient
        self._in, self._out = SideStream(device), SideStream(device)
        self._stages = [_Stage(map(self._coming, pieces), lambda size: _bytes(size, device)) for _ in range(2)]
        self.staged: list[Tensor] = [room for stage in self._stages for room in stage.rooms]
        """On the device."""
        self.host_nbytes = 0

    def run(self, step: Step) -> None:
        if not self.staged:
            for piece in self._pieces:
                step(piece, piece.weights, piece.gradient, piece.state)
            return
        self._in.wait_for_main()
        self._bring(0)
        for place, piece in enumerate(self._pieces):
            self._bring(place + 1)
            stage = self._stages[place % 2]
            self._in.hold_main(stage.arrived)
            gradient = stage.of(GRADIENT, piece.gradient) if self._gradient else piece.gradient
            state = piece.state
            if self._state:
                state = {name: stage.of(name, tensor) for name, tensor in state.items()}
            step(piece, piece.weights, gradient, state)
            self._out.wait_for_main()
            if self._state:
                with self._out.use():
                    for name, tensor in piece.state.items():
                        tensor.copy_(state[name], non_blocking=True)
            stage.left = self._out.mark()
        self._out.mark().wait()

    def _coming(self, piece: Piece) -> dict[str, Tensor]:
        """What has to be brought for a piece."""
        return (dict(piece.state) if self._state else {}) | ({GRADIENT: piece.gradient} if self._gradient else {})

    def _bring(self, place: int) -> None:
        if place == len(self._pieces):
            return
        stage = self._stages[place % 2]
        self._in.wait_for(stage.left)
        with self._in.use():
            for name, tensor in self._coming(self._pieces[place]).items():
                stage.of(name, tensor).copy_(tensor, non_blocking=True)
        stage.arrived = self._in.mark()


class OnHost:
    """Steps on the CPU: gradients come from the device, while the piece before is stepped; new weights go back.

    Args:
        wide: dtype of the arithmetic.
        gradient: the gradients rest on the host already.
    """

    def __init__(self, device: torch.device, pieces: Sequence[Piece], wide: torch.dtype, *, gradient: bool) -> None:
        self._pieces = pieces
        self._gradient = gradient
        self._in, self._out = SideStream(device), SideStream(device)
        self._stages = [
            _Stage(map(self._passing, pieces), lambda size: host_buffer(size, torch.uint8, device)) for _ in range(2)
        ]
        longest = max(len(piece.gradient) for piece in pieces)
        self._wide = None if pieces[0].gradient.dtype == wide else host_buffer(longest, wide, device, pinned=False)
        self.staged: list[Tensor] = []
        self.host_nbytes = sum(room.nbytes for stage in self._stages for room in stage.rooms)
        self.host_nbytes += 0 if self._wide is None else self._wide.nbytes

    def run(self, step: Step) -> None:
        self._in.wait_for_main()
        self._bring(0)
        for place, piece in enumerate(self._pieces):
            self._bring(place + 1)
            stage = self._stages[place % 2]
            stage.arrived.wait()
            stage.left.wait()
            gradient = piece.gradient if self._gradient else stage.of(GRADIENT, piece.gradient)
            if self._wide is not None:
                gradient = self._wide[: len(gradient)].copy_(gradient)
            target = piece.weights
            weights = stage.of(WEIGHTS, target)
            step(piece, weights, gradient, piece.state)
            with self._out.use():
                target.copy_(weights, non_blocking=True)
            stage.left = self._out.mark()
        self._out.mark().wait()

    def _passing(self, piece: Piece) -> dict[str, Tensor]:
        return {WEIGHTS: piece.weights} | ({} if self._gradient else {GRADIENT: piece.gradient})

    def _bring(self, place: int) -> None:
        if place == len(self._pieces) or self._gradient:
            return
        stage, gradient = self._stages[place % 2], self._pieces[place].gradient
        with self._in.use():
            stage.of(GRADIENT, gradient).copy_(gradient, non_blocking=True)
        stage.arrived = self._in.mark()


class _Stage:
    """Room for one piece's tensors on their way, whichever piece it is."""

    def __init__(self, passing: Iterable[Mapping[str, Tensor]], allocate: Callable[[int], Tensor]) -> None:
        sizes: dict[str, int] = {}
        for tensors in passing:
            for name, tensor in tensors.items():
                sizes[name] = max(sizes.get(name, 0), tensor.nbytes)
        self._room = {name: allocate(size) for name, size in sizes.items()}
        self.arrived = Mark()
        self.left = Mark()

    @property
    def rooms(self) -> list[Tensor]:
        return list(self._room.values())

    def of(self, name: str, like: Tensor) -> Tensor:
        """The room under that name, as a tensor like the one that is to lie in it."""
        return self._room[name][: like.nbytes].view(like.dtype)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
