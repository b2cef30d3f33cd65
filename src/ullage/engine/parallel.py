"""Several ranks: the communicator over torch.distributed, and the process group's start and end."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ullage.base import errors
from ullage.base.communicator import Communicator, Solo
from ullage.base.errors import PeerLostError, UllageError

TIMEOUT = timedelta(minutes=30)
"""Longest a rank waits for its peers: rewards and rollouts of one step may differ by minutes."""


class Ranks:
    """The communicator of a run with several ranks. Objects travel as JSON, never pickled."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._device = device

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum_tensor_(self, tensor: Tensor) -> None:
        self._run(lambda: dist.all_reduce(tensor))

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self._device)
        longest = int(self.max([float(len(payload))])[0])
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(payload)] = payload
        lengths = [int(n) for n in self._reduce(self._one_hot(len(payload)), dist.ReduceOp.SUM)]
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(parts, padded))
        return [json.loads(bytes(part[:n].cpu().numpy())) for part, n in zip(parts, lengths, strict=True)]

    def raise_together(self, error: UllageError | None) -> None:
        mine = None if error is None else [type(error).__name__, error.cause, error.remedy]
        for rank, told in enumerate(self.gather(mine)):
            if told is not None:
                name, cause, remedy = told
                raise getattr(errors, name, UllageError)(f"rank {rank}: {cause}" if self.size > 1 else cause, remedy)

    def _one_hot(self, value: float) -> list[float]:
        return [float(value) if rank == self.rank else 0.0 for rank in range(self.size)]

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:  # noqa: ANN401
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device)
        self._run(lambda: dist.all_reduce(tensor, op=op))
        return tensor.tolist()

    def _run(self, collective: Any) -> None:  # noqa: ANN401
        try:
            collective()
        except RuntimeError as error:  # gloo and NCCL report a dead peer this way
            first_line = str(error).splitlines()[0]
            raise PeerLostError(
                f"rank {self.rank} lost a peer: {first_line}", "see the logs of the other ranks"
            ) from error


def join(device: torch.device) -> Communicator:
    """The communicator of this process: `Solo`, unless the launcher set RANK and WORLD_SIZE for several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Solo()
    # Gradients may be collected on the host, so tensors of both kinds are summed.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    return Ranks(device)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
