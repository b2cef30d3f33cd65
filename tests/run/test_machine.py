"""The machine a run finds: control groups, GPUs that are known or shared, and budgets."""

import psutil
import pytest
import torch

from ullage.config.tree import Config
from ullage.model.target import Target
from ullage.planner.components import CONTEXT
from ullage.run.machine import enforce_budget, find_machine, host_memory, place_of

GIB = 1 << 30
CPU = Target("cpu", 0, (0, 0), 8 * GIB)
GPU = Target("cuda", 0, (9, 0), 100 * GIB)


def with_memory(**keys):
    return Config.model_validate({"memory": keys})


@pytest.fixture
def h200(monkeypatch):
    """A device of 100 GiB in which this process's context is all there is; a list of what else is in use."""
    others = [0]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB - CONTEXT - others[0], 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    return others


def group(root, file, limit):
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(f"{limit}\n")


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/step", {"sys/fs/cgroup/job/step/memory.max": 5 * GIB}, 5 * GIB),
        ("0::/job/a", {"sys/fs/cgroup/job/memory.max": 3 * GIB, "sys/fs/cgroup/job/a/memory.max": "max"}, 3 * GIB),
        ("0::/", {"sys/fs/cgroup/memory.max": 4 * GIB}, 4 * GIB),
        ("4:cpu,memory:/x", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": GIB}, GIB),
        # A container that sees its own group as the root.
        ("4:memory:/not/here", {"sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB}, 2 * GIB),
        ("4:memory:/", {"sys/fs/cgroup/memory/memory.limit_in_bytes": 1 << 62}, None),
        ("0::/", {"sys/fs/cgroup/memory.max": "max"}, None),
        ("0::/", {}, None),
    ],
)  # fmt: skip
def test_the_hosts_memory_ends_where_a_control_group_does(tmp_path, groups, limits, expected):
    group(tmp_path, "proc/self/cgroup", groups)
    for file, limit in limits.items():
        group(tmp_path, file, limit)
    there = psutil.virtual_memory().total
    assert host_memory(tmp_path) == min(there, expected or there)


def test_a_system_without_control_groups(tmp_path):
    assert host_memory(tmp_path) == psutil.virtual_memory().total


def test_ranks_share_the_memory_of_a_cpu(monkeypatch):
    monkeypatch.setattr("ullage.run.machine.host_memory", lambda: 8 * GIB)
    found = find_machine(CPU, Config(), 2)
    assert (found.machine.gpu.kind, found.machine.gpus, found.capacity_bytes) == ("cpu", 2, 4 * GIB)
    assert found.notes == ()


def test_a_known_gpu(h200):
    machine = find_machine(GPU, Config(), 2).machine
    assert (machine.gpu.name, machine.gpu.memory_bytes, machine.count) == ("NVIDIA H200", 100 * GIB, 2)
    assert (machine.gpu.bandwidth, machine.gpu.assumption) == (4800, "")
    assert machine.host_bytes == host_memory()


def test_an_unknown_gpu_is_one_of_its_size(h200, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Unheard Of 9000")
    gpu = find_machine(GPU, Config(), 1).machine.gpu
    assert (gpu.name, gpu.memory_bytes) == ("NVIDIA Unheard Of 9000", 100 * GIB)
    assert gpu.assumption.startswith("102400MiB: the speed of ")


def test_what_others_hold_is_not_there(h200):
    h200[0] = 30 * GIB
    found = find_machine(GPU, Config(), 1)
    assert found.capacity_bytes == 70 * GIB
    assert found.notes == ("other programs hold 30.0 GiB of this device: planned for the rest",)


@pytest.mark.parametrize(("budget", "capacity", "notes"), [("24GiB", 24 * GIB, 0), ("200GiB", 100 * GIB, 1)])
def test_a_budget_is_what_the_run_may_use(h200, budget, capacity, notes):
    found = find_machine(GPU, with_memory(budget=budget), 1)
    assert (found.capacity_bytes, len(found.notes)) == (capacity, notes)


def test_torch_keeps_to_the_budget(monkeypatch):
    limits = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    enforce_budget(GPU, Config())
    enforce_budget(CPU, with_memory(budget="4GiB"))
    assert limits == []
    for budget in ("24GiB", "200GiB", "100MiB"):
        enforce_budget(GPU, with_memory(budget=budget))
    assert limits == [((24 * GIB - CONTEXT) / (100 * GIB), GPU.device), (1.0, GPU.device), (0.0, GPU.device)]


def test_corrections_hold_for_a_way_of_training(h200):
    def kind(**model):
        return place_of(GPU, Config.model_validate({"actor_rollout_ref": {"model": model}})).kind

    assert [kind(), kind(lora_rank=8), kind(lora_rank=8, quantization="nf4")] == ["full", "lora", "nf4"]
    place = place_of(GPU, Config())
    assert (place.device, place.torch) == ("NVIDIA H200", torch.__version__)
    assert place_of(CPU, Config()) is None
