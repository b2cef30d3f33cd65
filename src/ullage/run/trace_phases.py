"""Records what Ullage's own phases allocate on a CUDA device, on a machine that has none.

The device is torch's `meta`: its tensors have shapes, storages and gradients, but no bytes. What the phases keep on the
host (batches, packing, host-resident state) stays real and is computed as ever; the two never mix without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ullage.model.target import Target
from ullage.run.trace import Phase, Recorder, Trace

DEVICE = torch.device("meta")
_aten = torch.ops.aten


class TracedTarget(Target):
    """Chooses kernels like the CUDA device it stands for; its tensors hold nothing."""

    @property
    def device(self) -> torch.device:
        return DEVICE


def traced_target(capability: tuple[int, int], memory_bytes: int) -> TracedTarget:
    return TracedTarget("cuda", 0, capability, memory_bytes)


def record_phases(step: Callable[[Phase], None]) -> Trace:
    """What `step` allocates and frees on the device of a `TracedTarget`."""
    return _DeviceRecorder().run(step)


class _DeviceRecorder(Recorder):
    """Counts the device's storages, and answers where the host asks for a value that is not there."""

    def counts(self, tensor: Tensor) -> bool:
        return tensor.device == DEVICE

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if func is _aten._local_scalar_dense.default and self.counts(args[0]):
            return torch.ones((), dtype=args[0].dtype).item()
        if func is _aten._to_copy.default and self.counts(args[0]) and _on_host(kwargs.get("device")):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is _aten.copy_.default and self.counts(args[1]) and not self.counts(args[0]):
            return args[0]
        return super().compute(func, args, kwargs)


def _on_host(device: torch.device | None) -> bool:
    return device is not None and torch.device(device).type == "cpu"
