"""Memory and time of your own code, by the names that verl users know; the code is in ullage/compat/profiler.py."""

from ullage.compat.profiler import (
    GPUMemoryLogger,
    PerformanceMonitor,
    get_memory_usage,
    log_gpu_memory_usage,
    log_memory_usage,
    log_performance_metrics,
    monitor_gradients,
    optimize_memory_usage,
    profile_memory_usage,
    simple_timer,
    timer,
)

__all__ = [
    "GPUMemoryLogger",
    "PerformanceMonitor",
    "get_memory_usage",
    "log_gpu_memory_usage",
    "log_memory_usage",
    "log_performance_metrics",
    "monitor_gradients",
    "optimize_memory_usage",
    "profile_memory_usage",
    "simple_timer",
    "timer",
]
