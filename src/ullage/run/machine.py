"""The machine that a run finds itself on, in the words of the planner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from ullage.base.errors import UsageError
from ullage.base.units import bytes_of, bytes_text
from ullage.config.tree import Config
from ullage.model.target import Target
from ullage.planner.choose import capacity_of
from ullage.planner.components import CONTEXT
from ullage.planner.corrections import Place
from ullage.planner.hardware import GPU, MIB, Machine, find_gpu

FOREIGN = 256 * MIB
"""Less than this on a device is a desktop or a driver, not another program's work."""
LIMITS = {"": ("sys/fs/cgroup", "memory.max"), "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes")}
"""Where a control group's limit is, by controller: version 2, then version 1."""


@dataclass(frozen=True, slots=True)
class Found:
    """The machine as far as this run may use it, and what the user should know about that."""

    machine: Machine
    capacity_bytes: int
    """Of one rank's device, as far as the budget goes."""
    notes: tuple[str, ...]


def find_machine(target: Target, config: Config, ranks: int) -> Found:
    """The devices of all ranks are taken to be like this one. A budget beyond what is there gives what is there."""
    host, notes = host_memory(), []
    if target.kind == "cuda":
        gpu, held = _this_gpu(target), held_by_others(target)
        if held > FOREIGN:
            notes.append(f"other programs hold {bytes_text(held)} of this device: planned for the rest")
            gpu = replace(gpu, memory_bytes=gpu.memory_bytes - held)
    else:
        gpu = _this_cpu(host // ranks)
    machine = Machine(gpu=gpu, count=ranks, host_bytes=host if target.kind == "cuda" else None)
    if (bytes_of(config.memory.budget) or 0) > gpu.memory_bytes:
        there = bytes_text(gpu.memory_bytes)
        notes.append(f"memory.budget = {config.memory.budget}: there are only {there}, which is what counts")
    return Found(machine, capacity_of(config, machine), tuple(notes))


def enforce_budget(target: Target, config: Config) -> None:
    """Torch must not allocate beyond memory.budget, of which the context of CUDA takes a part by itself."""
    budget = bytes_of(config.memory.budget)
    if target.kind == "cuda" and budget is not None:
        share = max(0.0, min(1.0, (budget - CONTEXT) / target.memory_bytes))
        torch.cuda.set_per_process_memory_fraction(share, target.device)


def place_of(target: Target, config: Config) -> Place | None:
    """Where corrections hold. None on a CPU: there a process is measured, interpreter and all, not its tensors."""
    if target.kind != "cuda":
        return None
    model = config.actor_rollout_ref.model
    adapted = model.lora_rank or model.lora_adapter_path
    return Place(
        device=torch.cuda.get_device_name(target.device),
        driver=_driver(),
        torch=torch.__version__,
        kind=(model.quantization or "lora") if adapted else "full",
    )


def held_by_others(target: Target) -> int:
    """Bytes of the device that neither this process nor the context it comes with holds."""
    free, total = torch.cuda.mem_get_info(target.device)
    return max(0, total - free - torch.cuda.memory_reserved(target.device) - CONTEXT)


def host_memory(root: Path = Path("/")) -> int:
    """RAM that this process may use: the machine's, or the limit of a control group that it runs in."""
    return min([int(psutil.virtual_memory().total), *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[int]:
    """Of this process's groups and all those above them. A container may see its own group as the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        for controller in set(LIMITS) & set(controllers.split(",")):
            folder, name = LIMITS[controller]
            top = root / folder
            own = top / group.lstrip("/")
            for place in {top, own, *(parent for parent in own.parents if parent.is_relative_to(top))}:
                try:
                    text = (place / name).read_text().strip()
                except OSError:
                    continue
                if text.isdecimal():  # else `max`
                    yield int(text)


def _this_gpu(target: Target) -> GPU:
    name = torch.cuda.get_device_name(target.device)
    try:
        known = find_gpu(name)
    except UsageError:
        known = find_gpu(f"{target.memory_bytes // MIB}MiB")
    return replace(known, name=name, memory_bytes=target.memory_bytes)


def _this_cpu(memory: int) -> GPU:
    """As the device of a rank; nothing is chosen by its speed."""
    return GPU(
        name="CPU",
        memory_bytes=memory,
        total_bytes=memory,
        bandwidth=50.0,
        tflops_bf16=0.5,
        tensor_dtype="float32",
        interconnect_gbs=0.0,
        pcie_gbs=50.0,
        vendor="",
        kind="cpu",
        year=0,
        compute_capability=None,
    )


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else "unknown"
