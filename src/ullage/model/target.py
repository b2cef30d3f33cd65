"""Where the numbers are computed: decides kernels and dtypes explicitly, never by looking at a tensor's device.

A tracer can run CUDA's path on fake CPU tensors, because every choice of kernel asks a `Target`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import psutil
import torch
from torch import Tensor

from ullage.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """The device a phase is built for."""

    kind: Literal["cpu", "cuda"]
    """`cpu` or `cuda`."""
    index: int
    capability: tuple[int, int]
    """CUDA compute capability; (0, 0) on a CPU."""
    memory_bytes: int

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    def varlen_attention(self, dtype: torch.dtype) -> bool:
        """Whether packed attention runs on `torch.nn.attention.varlen` (flash kernels: half precision, Ampere up)."""
        return self.kind == "cuda" and self.capability >= (8, 0) and dtype in (torch.bfloat16, torch.float16)

    def fused_head(self, dtype: torch.dtype) -> bool:
        """Whether the LM head runs on kernels of our own."""
        return self.varlen_attention(dtype) and dtype == torch.bfloat16

    def wide_attention(self, dtype: torch.dtype) -> bool:
        """Whether attention is computed in float64 between float32 layers.

        CPU matrix products give a row the same bits whatever rows surround it (from a dozen rows on), so attention is
        the only place where packing, batching and caching could round differently. In float64 they agree before the
        result is rounded to float32: rollout and trainer then see the same numbers, not just close ones.
        """
        return self.kind == "cpu" and dtype == torch.float32

    @property
    def default_dtype(self) -> torch.dtype:
        """bf16 on a CPU without matrix units is several times slower than fp32."""
        return torch.bfloat16 if self.kind == "cuda" else torch.float32


def find_target(device: str, local_rank: int) -> Target:
    """The target of this rank for `trainer.device`: auto, cpu or cuda."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError("trainer.device = cuda: no CUDA device can be used here", "set trainer.device=auto or cpu")
    if device == "cpu" or not available:
        return Target("cpu", 0, (0, 0), psutil.virtual_memory().total)
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"trainer.n_gpus_per_node asks for GPU {local_rank}, this machine has {torch.cuda.device_count()}",
            f"set trainer.n_gpus_per_node={torch.cuda.device_count()}",
        )
    properties = torch.cuda.get_device_properties(local_rank)
    return Target("cuda", local_rank, (properties.major, properties.minor), properties.total_memory)


def put(values: Tensor, device: torch.device) -> Tensor:
    """To the device, behind what it has yet to do, while the host goes on.

    Out of ordinary memory, CUDA copies more than a little only when all before it is done. Pinned memory is torch's: it
    hands a piece out again when the copy out of it has been made.
    """
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
