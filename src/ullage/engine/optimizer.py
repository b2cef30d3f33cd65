"""The optimizer: in place over the model's own parameters; gradients and state lie where the levers put them.

Weights never move, so the rollout engine (and captured graphs, offload and sharding) can keep reading them. Half
precision weights keep small updates in one of two ways: a float32 master beside them, or stochastic rounding; at a
learning rate of 1e-6 round-to-nearest would lose every update. It would hide them with a master, too: bfloat16 weights
follow theirs by thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.base.errors import ConfigError
from ullage.base.seeds import derive
from ullage.config.tree import Optim
from ullage.engine.gradients import Gradients, HostGradients, global_norm
from ullage.engine.placement import OnDevice, OnHost, Piece
from ullage.engine.rules import (
    SGD,
    AdamW,
    AdamW8bit,
    Hyper,
    Place,
    Rule,
    StateTensor,
    round_by_thresholds_,
    round_stochastically_,
    step_fused_,
)
from ullage.engine.streams import host_buffer

MASTER = "master"
HALF = (torch.bfloat16, torch.float16)
COPIED = 1 << 22
"""Elements that go to a master at once: from a device to wider ones on the host, there is a copy on the way."""
RULES: dict[str, type[AdamW] | type[AdamW8bit] | type[SGD]] = {"adamw": AdamW, "adamw_8bit": AdamW8bit, "sgd": SGD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """What an optimizer keeps where, and in how many bits."""

    rounding: Literal["master", "stochastic"] = "master"
    """How half precision weights keep small updates."""
    state: Literal["device", "streamed", "host"] = "device"
    """On the device; on the host, streamed through the device for a step; on the host and stepped there."""
    gradients: Literal["weights", "float32", "host"] = "weights"
    """Accumulated in the weights' dtype; in float32 at least; or in the weights' dtype, on the host."""


class Optimizer:
    """Owns gradients, moments and (for half precision) master weights of the parameters it is given.

    Args:
        seed: of rounding; random bits follow from it, the step and the weight's place alone, and thresholds do not
            even follow from the step.
        piece: elements stepped at once, a multiple of 256; what a step needs beside the state grows with it, but where
            one kernel does it all and nothing comes from the host it needs nothing, and a piece is a parameter.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        config: Optim,
        levers: Levers | None = None,
        *,
        seed: int = 0,
        piece: int = 1 << 22,
    ) -> None:
        self.config = config
        self.levers = levers or Levers()
        self.seed = seed
        self.names, tensors = zip(*[(name, p) for name, p in parameters if p.requires_grad], strict=True)
        self.parameters: list[Tensor] = list(tensors)
        self.num_steps = 0
        """Updates made so far, also before a resume."""
        dtype = self.parameters[0].dtype
        assert all(p.dtype == dtype and p.is_contiguous() for p in self.parameters), "one dtype, no gaps"
        self._half = dtype in HALF
        self._wide = torch.float32 if self._half else dtype
        # A trace on `meta` stands for a CUDA device, also where it pretends to step on the host.
        on_cuda = self.parameters[0].device.type in ("cuda", "meta") and self.levers.state != "host"
        self._fused = on_cuda and dtype == torch.bfloat16
        check(config, self.levers, dtype)
        self._rule: Rule = RULES[config.optimizer](self._wide)
        self._collected = self._make_gradients(dtype)
        self._flats: dict[tuple[str, torch.dtype], Tensor] = {}
        self._state = self._make_state()
        self.master = self._flats.get((MASTER, self._wide))
        self._copy_to_master()
        self._placement = self._make_placement(piece)

    @property
    def gradient(self) -> Tensor:
        """All gradients, one after another."""
        self._collected.settle()
        return self._collected.flat

    @property
    def lendable(self) -> Tensor | None:
        """Memory on the device that is of no use from a step to the next backward pass: the gradients'."""
        return None if self._collected.on_host else self._collected.flat

    def zero_grad(self) -> None:
        self._collected.zero()

    @torch.no_grad()
    def step(self, learning_rate: float, ranks: Communicator) -> float:
        """Sum gradients over ranks, clip, update. Returns the gradient norm before clipping; non-finite: no update."""
        gradient = self.gradient
        ranks.sum_tensor_(gradient)
        norm = global_norm(gradient)
        if not math.isfinite(norm):
            return norm
        limit, config = self.config.clip_grad, self.config
        scale = limit / (norm + 1e-6) if norm > limit else 1.0
        self.num_steps += 1
        hyper = Hyper(
            learning_rate=learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            step=self.num_steps,
        )

        def step_piece(piece: Piece, weights: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
            place = Place(derive(self.seed, self.num_steps, piece.name), piece.start)
            thresholds = Place(derive(self.seed, piece.name), piece.start)
            if self._fused:
                step_fused_(weights, state.get(MASTER), gradient, state, hyper, place, thresholds, scale=scale)
                return
            gradient = gradient.to(self._wide)
            if scale != 1:
                gradient.mul_(scale)
            work = state[MASTER] if MASTER in state else weights.to(self._wide)
            self._rule.step_(work, gradient, state, hyper, place)
            if self._half and MASTER not in state:
                round_stochastically_(weights, work, place)
            elif weights.dtype == torch.bfloat16:
                round_by_thresholds_(weights, work, thresholds)
            elif MASTER in state:
                weights.copy_(work)

        self._placement.run(step_piece)
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs beside the weights; the same wherever state lives."""
        tensors = {"step": torch.tensor(self.num_steps)}
        for name, p, state in zip(self.names, self.parameters, self._state, strict=True):
            for key, value in state.items():
                if key != MASTER or self._half:
                    tensors[f"{key}/{name}"] = value.view_as(p) if value.numel() == p.numel() else value
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's tensors into place; the weights have been restored before."""
        wanted = self.tensors()
        masters = {name for name in wanted if name.startswith(f"{MASTER}/")}
        missing = sorted(wanted.keys() - tensors.keys() - masters)
        if missing:
            raise ConfigError(
                f"the checkpoint's optimizer state has no {missing[0]}",
                "resume with the optimizer of the run that wrote it",
            )
        self.num_steps = int(tensors["step"])
        # Weights that were rounded stochastically, or are full precision, are their own master.
        self._copy_to_master()
        for name in wanted.keys() & tensors.keys():
            wanted[name].copy_(tensors[name])

    def owned(self) -> dict[str, list[Tensor]]:
        """What it holds on the device, by component, as the memory report names them."""
        here = self._flats if self.levers.state == "device" else {}
        return {
            "gradients": [] if self._collected.on_host else [self._collected.flat],
            "optimizer": [flat for (name, _), flat in here.items() if name != MASTER] + self._placement.staged,
            "master": [flat for (name, _), flat in here.items() if name == MASTER],
        }

    def nbytes(self) -> dict[str, int]:
        """The same in bytes."""
        return {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in self.owned().items()}

    def host_nbytes(self) -> dict[str, int]:
        """The same on the host, where a lever puts something there."""
        on_device = self.levers.state == "device"
        state, master = self._state_nbytes()
        return {
            "gradients": self._collected.host_nbytes,
            "optimizer": (0 if on_device else state) + self._placement.host_nbytes,
            "master": 0 if on_device else master,
        }

    # --- how it is built ---

    def _make_gradients(self, dtype: torch.dtype) -> Gradients | HostGradients:
        if self.levers.gradients == "host":
            return HostGradients(self.parameters, dtype)
        return Gradients(self.parameters, self._wide if self.levers.gradients == "float32" else dtype)

    def _make_state(self) -> list[dict[str, Tensor]]:
        """For every parameter its state by name, ranges of a few flat tensors.

        All of it exists from the start, at its final size, so that no later step sets a new high-water mark.
        """
        kinds = [self._kinds(p.numel()) for p in self.parameters]
        ends: dict[tuple[str, torch.dtype], int] = {}
        ranges = []
        for p, kind in zip(self.parameters, kinds, strict=True):
            mine = {}
            for name, tensor in kind.items():
                start = ends.get((name, tensor.dtype), 0)
                ends[name, tensor.dtype] = start + tensor.entries(p.numel())
                mine[name, tensor.dtype] = slice(start, ends[name, tensor.dtype])
            ranges.append(mine)
        self._flats = {key: self._allocate(end, key[1]) for key, end in ends.items()}
        return [{key[0]: self._flats[key][place] for key, place in mine.items()} for mine in ranges]

    def _kinds(self, numel: int) -> dict[str, StateTensor]:
        """The rule's state, and the master where there is one; what is stepped on the host needs one in any case."""
        kinds = dict(self._rule.state(numel))
        if self.levers.state == "host" or (self._half and self.levers.rounding == "master"):
            kinds[MASTER] = StateTensor(self._wide)
        return kinds

    def _allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        device = self.parameters[0].device
        if self.levers.state == "device":
            return torch.zeros(numel, dtype=dtype, device=device)
        # What is stepped on the host is never copied from there, so it need not be pinned.
        return host_buffer(numel, dtype, device, pinned=self.levers.state == "streamed")

    def _copy_to_master(self) -> None:
        for p, state in zip(self.parameters, self._state, strict=True):
            if MASTER in state:
                parts = zip(state[MASTER].split(COPIED), p.detach().view(-1).split(COPIED), strict=True)
                for master, weights in parts:
                    master.copy_(weights)

    def _make_placement(self, piece: int) -> OnDevice | OnHost:
        device, on_host = self.parameters[0].device, self._collected.on_host
        if self._fused and self.levers.state == "device" and not on_host:
            piece = max(p.numel() for p in self.parameters)  # nothing is staged and nothing made: fewest launches
        pieces = [*self._pieces(piece)]
        if self.levers.state == "host":
            return OnHost(device, pieces, self._wide, gradient=on_host)
        return OnDevice(device, pieces, state=self.levers.state == "streamed", gradient=on_host)

    def _pieces(self, size: int) -> Iterator[Piece]:
        gradients = self._collected.flat.split([p.numel() for p in self.parameters])
        for name, p, gradient, state in zip(self.names, self.parameters, gradients, self._state, strict=True):
            kinds = self._kinds(p.numel())
            for start in range(0, p.numel(), size):
                end = min(start + size, p.numel())
                part = {key: state[key][start // kind.elements : kind.entries(end)] for key, kind in kinds.items()}
                yield Piece(name, p, start, gradient[start:end], part)

    def _state_nbytes(self) -> tuple[int, int]:
        master = 0 if self.master is None else self.master.nbytes
        return sum(flat.nbytes for flat in self._flats.values()) - master, master


def check(config: Optim, levers: Levers, dtype: torch.dtype) -> None:
    """Levers that do not go together, before anything is allocated."""
    if levers.rounding == "stochastic" and dtype == torch.float16:
        raise ConfigError(
            "stochastic rounding needs bfloat16 weights; these are float16", "use bfloat16, or keep a master"
        )
    if levers.state != "host":
        return
    if config.optimizer == "adamw_8bit":
        raise ConfigError("adamw_8bit is not stepped on the host", "stream its state instead, or use adamw")
    if levers.rounding == "stochastic" and dtype == torch.bfloat16:
        raise ConfigError(
            "an optimizer on the host keeps a float32 master there, so nothing is left to round stochastically",
            "stream the state instead, or keep the master",
        )


def learning_rate(config: Optim, step: int, total_steps: int) -> float:
    """Rate of update step `step` (from 0): linear warm-up, then constant or a cosine down to `min_lr_ratio`."""
    warmup = config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
