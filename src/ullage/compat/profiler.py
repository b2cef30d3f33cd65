"""Memory and time of your own code: CUDA's allocator where there is a GPU, otherwise this process. Nothing is printed:
lines go to `logging`. A run of Ullage's measures itself (memory.jsonl, `time/<phase>`)."""

from __future__ import annotations

import functools
import gc
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import psutil
import torch

GIB = 1 << 30
_log = logging.getLogger("ullage.profiler")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


# --- memory ---


def get_memory_usage(device: torch.device | str | None = None) -> dict[str, float]:
    """GiB on a device (the GPU where there is one): allocated, reserved, the peak of allocated, and the total.

    On a CPU allocated and reserved are what this process holds in memory, and the peak is its highest ever.
    """
    place = torch.device(device) if device is not None else _device()
    if place.type == "cuda":
        total = torch.cuda.get_device_properties(place).total_memory
        numbers = {
            "allocated_gib": torch.cuda.memory_allocated(place),
            "reserved_gib": torch.cuda.memory_reserved(place),
            "peak_allocated_gib": torch.cuda.max_memory_allocated(place),
            "total_gib": total,
        }
    else:
        resident = psutil.Process().memory_info().rss
        # The kernel updates its high-water mark lazily, so it may lag behind.
        numbers = {
            "allocated_gib": resident,
            "reserved_gib": resident,
            "peak_allocated_gib": max(resident, _resident_peak()),
            "total_gib": psutil.virtual_memory().total,
        }
    return {name: number / GIB for name, number in numbers.items()}


def profile_memory_usage() -> dict[str, float]:
    """The device's memory, and beside it what this process holds on the host, in GiB."""
    return get_memory_usage() | {"host_gib": psutil.Process().memory_info().rss / GIB}


def log_gpu_memory_usage(head: str, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
    """One line with the memory of this moment."""
    usage = get_memory_usage()
    (logger or _log).log(
        level,
        "%s: allocated %.3f GiB, reserved %.3f GiB, peak %.3f GiB of %.1f GiB on %s",
        head,
        usage["allocated_gib"],
        usage["reserved_gib"],
        usage["peak_allocated_gib"],
        usage["total_gib"],
        _device().type,
    )


def log_memory_usage(message: str, logger: logging.Logger) -> None:
    """The same, to a logger of yours."""
    log_gpu_memory_usage(message, logger)


class GPUMemoryLogger:
    """Logs memory before and after a function, as `@GPUMemoryLogger(role="actor")`, or a `with` block."""

    def __init__(self, role: str, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        self.role = role
        self.logger = logger
        self.level = level

    def __call__(self, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        named = GPUMemoryLogger(f"{self.role} {function.__name__}", self.logger, self.level)

        @functools.wraps(function)
        def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
            with named:
                return function(*arguments, **options)

        return call

    def __enter__(self) -> Self:
        log_gpu_memory_usage(f"before {self.role}", self.logger, self.level)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        log_gpu_memory_usage(f"after {self.role}", self.logger, self.level)


class PerformanceMonitor:
    """Time and memory since `start()`."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._before = 0.0

    def start(self) -> None:
        """Begin to count; on a GPU, forget earlier peaks."""
        if _device().type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._before = get_memory_usage()["allocated_gib"]
        self._started = time.monotonic()

    def get_memory_stats(self) -> dict[str, float]:
        """The device's memory in GiB, how much of it came since the start, and the seconds since then."""
        usage = profile_memory_usage()
        if self._started is not None:
            usage["allocated_since_start_gib"] = usage["allocated_gib"] - self._before
            usage["seconds"] = time.monotonic() - self._started
        return usage


def optimize_memory_usage(model: torch.nn.Module) -> None:
    """What can be had for a model of your own without changing a result: recompute activations where the model knows
    how, and give back memory that nothing uses. (A run of Ullage's has `enable_gradient_checkpointing`.)"""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None:
        enable()
        _log.info("gradient checkpointing is on for %s", type(model).__name__)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- time and gradients ---


@contextmanager
def simple_timer(name: str, timing_dict: MutableMapping[str, float]) -> Iterator[None]:
    """Add the seconds of the block to `timing_dict[name]`; a GPU's queue is waited for on both sides."""
    _wait_for_device()
    began = time.perf_counter()
    try:
        yield
    finally:
        _wait_for_device()
        timing_dict[name] = timing_dict.get(name, 0.0) + time.perf_counter() - began


timer = simple_timer


def log_performance_metrics(metrics: Mapping[str, float]) -> None:
    """One line with every number, by name."""
    _log.info("%s", " ".join(f"{name}={metrics[name]:.6g}" for name in sorted(metrics)))


def monitor_gradients(model: torch.nn.Module) -> float:
    """The norm of all gradients of a model together, logged and returned."""
    norms = [p.grad.detach().norm(2).item() for p in model.parameters() if p.grad is not None]
    total: float = sum(norm**2 for norm in norms) ** 0.5
    _log.info("gradient norm: %.6g", total)
    return total


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _wait_for_device() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _resident_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes
