"""Records what Ullage's own phases allocate on a CUDA device, on a machine that has none.

The device is torch's `meta`: its tensors have shapes, storages and gradients, but no bytes. Batches and packing stay
real on the host and are computed as ever; the two never mix without a copy. Large host buffers (state, gradients and
activations that wait there) have no bytes either: they lie on the same `meta`, and are told apart by their storage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ullage.engine.streams import HOLLOW, is_hollow, mark_hollow
from ullage.model.target import Target
from ullage.run.trace import Phase, Recorder, Trace

DEVICE = torch.device("meta")
_aten = torch.ops.aten


class TracedTarget(Target):
    """Chooses kernels like the CUDA device it stands for; its tensors hold nothing."""

    @property
    def device(self) -> torch.device:
        return DEVICE


class TracedCapture:
    """Runs steps as rollout/embedded/cuda.py does to capture them: once on a queue of their own, once into a pool.

    What is replayed allocates nothing.
    """

    nbytes = 0

    def __init__(self, mark: Phase) -> None:
        self._mark = mark
        self._has_workspace = False

    def __call__(self, step: Callable[[], object]) -> Callable[[], None]:
        mark = self._mark
        if not self._has_workspace:
            mark.workspace("side")
            self._has_workspace = True
        mark.again()
        with mark.on("side"):
            step()
        mark.empty_cache()
        mark.again()
        with mark.on("graphs"):
            step()
        mark.again()
        return lambda: None

    def forget(self) -> None:
        """Weights do not move in a trace."""


def traced_target(capability: tuple[int, int], memory_bytes: int) -> TracedTarget:
    return TracedTarget("cuda", 0, capability, memory_bytes)


def record_phases(step: Callable[[Phase], None]) -> Trace:
    """What `step` allocates and frees on the device of a `TracedTarget`."""
    return _DeviceRecorder().run(step)


class _DeviceRecorder(Recorder):
    """Counts the device's storages, and answers where the host asks for a value that is not there."""

    def counts(self, tensor: Tensor) -> bool:
        return tensor.device == DEVICE and not is_hollow(tensor)

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if func is _aten._local_scalar_dense.default and args[0].device == DEVICE:
            return torch.ones((), dtype=args[0].dtype).item()
        if HOLLOW and kwargs.get("device") is None and _all_hollow(args):
            out = super().compute(func, args, kwargs)
            for leaf in tree_leaves(out):  # the host's own work stays there
                if isinstance(leaf, Tensor) and leaf.device == DEVICE:
                    mark_hollow(leaf)
            return out
        if func is _aten._to_copy.default and args[0].device == DEVICE and _on_host(kwargs.get("device")):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is _aten.copy_.default and args[1].device == DEVICE and args[0].device != DEVICE:
            return args[0]
        return super().compute(func, args, kwargs)


def _all_hollow(args: tuple[Any, ...]) -> bool:
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(map(is_hollow, tensors))


def _on_host(device: torch.device | None) -> bool:
    return device is not None and torch.device(device).type == "cpu"
