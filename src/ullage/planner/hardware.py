"""GPUs, machines of them, and what clouds rent out: from the bundled, dated and sourced data files."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from ullage.base.errors import UsageError
from ullage.base.units import bytes_of

MIB = 2**20
MAKERS = ("nvidia", "geforce", "tesla", "amd", "instinct")
"""Words that drivers put before a name and people leave out."""
LANE_GBS = {3: 0.985, 4: 1.969, 5: 3.938}
"""PCI Express, one lane, one direction: 8, 16 and 32 GT/s, 128 of 130 bits of them data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One device."""

    name: str
    memory_bytes: int
    """What the CUDA runtime reports as the device's total: the contexts of processes still come out of it."""
    total_bytes: int
    """As nvidia-smi shows."""
    bandwidth: float
    """Of its memory, GB/s, as specified."""
    tflops_bf16: float
    """Of its tensor cores, dense, TFLOP/s, as specified; fp16 where `tensor_dtype` says so."""
    tensor_dtype: str
    interconnect_gbs: float
    """NVLink or Infinity Fabric, both directions together; 0: none."""
    pcie_gbs: float
    """To the host, one direction, as specified."""
    vendor: str
    kind: str
    """`data center`, `workstation` or `consumer`; `size` where only its memory was given."""
    year: int
    compute_capability: str | None
    assumption: str = ""
    """What was guessed, where something was."""

    @property
    def trains(self) -> bool:
        """Whether Ullage trains on it: CUDA, and bf16 in its tensor cores."""
        return self.vendor == "NVIDIA" and self.tensor_dtype == "bf16"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What its numbers rest on, where they are not simply its own."""
        lacks = "is no CUDA device" if self.vendor != "NVIDIA" else "has no bf16 in its tensor cores"
        no = () if self.trains or self.kind == "cpu" else (f"{self.name} {lacks}: Ullage does not train on it",)
        return (*no, *([self.assumption] if self.assumption else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal nodes of equal GPUs."""

    gpu: GPU
    count: int = 1
    """GPUs of a node."""
    nodes: int = 1
    host_bytes: int | None = None
    """RAM of a node, where known."""

    @property
    def gpus(self) -> int:
        return self.count * self.nodes

    @property
    def option(self) -> str:
        """`--gpu 'RTX 4090 x8' --nodes 2`, as a command line has it."""
        name = self.gpu.name if self.count == 1 else f"{self.gpu.name} x{self.count}"
        return f"--gpu {name!r}" + (f" --nodes {self.nodes}" if self.nodes > 1 else "")

    @property
    def text(self) -> str:
        """`2x RTX 4090`, `4 nodes of 8x H200`."""
        node = self.gpu.name if self.count == 1 else f"{self.count}x {self.gpu.name}"
        return node if self.nodes == 1 else f"{self.nodes} nodes of {node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What a cloud rents out under one name."""

    provider: str
    name: str
    machine: Machine
    vcpus: int | None
    price: float | None
    """On demand, USD an hour for all of it; None: no price was found."""
    region: str | None
    date: str
    """Of the price."""
    source: str
    """Where the price was read."""


@cache
def gpus() -> tuple[GPU, ...]:
    """Every GPU of the data file."""
    return tuple(_gpu(row) for row in _data("gpus.json")["gpus"])


@cache
def instances() -> tuple[Instance, ...]:
    """Every instance of the data file."""
    found = _data("clouds.json")
    return tuple(_instance(row, found["sources"][row["source"]]) for row in found["instances"])


def find_gpu(text: str) -> GPU:
    """By name or alias, whatever its case, spaces and maker; by size (`24GiB`) with the speed of a card that large."""
    known = _names()
    name = _plain(text)
    if name in known:
        return known[name]
    if bytes_of(text) is not None:
        return _gpu_of_size(parse_size(text), text.strip())
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", text):
        raise UsageError(f"no GPU {text!r} is known", f"a size has a unit: {text.strip()}GiB")
    if re.fullmatch(r"\s*(\d+\s*[x*]|[x*]\s*\d+)?\s*", text, re.IGNORECASE):
        raise UsageError(f"{text!r} names no GPU", "for example h200, '4090 x2' or 24GiB")
    counted = re.fullmatch(r".*\S\s+[x*]\s*(-?[\d.]+)\s*", text, re.IGNORECASE)
    if counted:
        raise UsageError(f"{text!r}: {counted[1]} GPUs", "give a whole number from 1 to 999, such as '4090 x2'")
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    names = ", ".join(dict.fromkeys(known[match].name for match in near))
    hint = f"nearest: {names}" if names else "for example h200, 4090 or 24GiB"
    raise UsageError(f"no GPU {text!r} is known", f"{hint}; or give its memory, such as 24GiB")


def sources_of(gpu: GPU) -> dict[str, tuple[float, str]]:
    """Its numbers in the data file, each with where it was read; nothing of a size."""
    data = _data("gpus.json")
    row = next((row for row in data["gpus"] if row["name"] == gpu.name), None)
    if row is None:
        return {}
    named = {field: data["sources"][source] for field, source in row["sources"].items() if source}
    return {
        field: (row[field], source["title"] + (f", {source['url']}" if source["url"] else ""))
        for field, source in named.items()
        if isinstance(row[field], int | float)
    }


def parse_machine(text: str, nodes: int = 1, *, count: int = 1) -> Machine:
    """`h200`, `4090 x2`, `8xH100`, `2x24GiB`, or the name of a cloud instance such as `p5.48xlarge`.

    A name without a number stands for `count` GPUs.
    """
    if nodes < 1:
        raise UsageError(f"{nodes} nodes", "give 1 or more")
    for instance in instances():
        if text.strip().lower() == instance.name.lower():
            return replace(instance.machine, nodes=nodes)
    name, count = _split(text, count)
    if count < 1:
        raise UsageError(f"{text!r}: {count} GPUs", "give 1 or more")
    return Machine(gpu=find_gpu(name), count=count, nodes=nodes)


def parse_size(text: str) -> int:
    """`64GiB` -> bytes."""
    size = bytes_of(text)
    if size is None:
        raise UsageError(f"{text!r} is no size", "give a number with its unit, such as 64GiB")
    return size


def _split(text: str, without: int) -> tuple[str, int]:
    """The GPU and how many. `2x4090` and `4090x2` are told apart by which end is a GPU; `RTX 4090` has no count."""
    words = text.strip()
    before = re.fullmatch(r"(\d{1,3})\s*[x*]\s*(\S.*)", words, re.IGNORECASE)
    after = re.fullmatch(r"(.*\S)\s*[x*]\s*(\d{1,3})", words, re.IGNORECASE)
    readings = [(words, without)]
    readings += [(after[1], int(after[2]))] if after else []
    readings += [(before[2], int(before[1]))] if before else []
    for name, count in readings:
        if _plain(name) in _names() or bytes_of(name) is not None:
            return name, count
    return readings[-1]


@cache
def _names() -> dict[str, GPU]:
    """Every name and alias, without spaces and makers."""
    rows = zip(gpus(), _data("gpus.json")["gpus"], strict=True)
    return {_plain(name): gpu for gpu, row in rows for name in (row["name"], *row["aliases"])}


def _plain(text: str) -> str:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return "".join(word for word in words if word not in MAKERS)


def _gpu_of_size(memory: int, text: str) -> GPU:
    """A budget of memory: all of it is usable, the rest is of the NVIDIA card whose memory is nearest."""
    like = min((gpu for gpu in gpus() if gpu.trains), key=lambda gpu: abs(gpu.memory_bytes - memory))
    if memory < 2**30:
        raise UsageError(f"{text}: too small for a GPU", "give at least 1GiB")
    told = f"{text}: the speed of {like.name} is assumed; name a GPU for its own"
    return replace(like, name=text, kind="size", memory_bytes=memory, total_bytes=memory, assumption=told)


def _gpu(row: dict[str, Any]) -> GPU:
    return GPU(
        name=row["name"],
        memory_bytes=row["usable_mib"] * MIB,
        total_bytes=row["total_mib"] * MIB,
        bandwidth=row["bandwidth_gbs"],
        tflops_bf16=row["tflops"],
        tensor_dtype=row["tensor_dtype"],
        interconnect_gbs=row["interconnect_gbs"],
        pcie_gbs=row["pcie_lanes"] * LANE_GBS[row["pcie_generation"]],
        vendor=row["vendor"],
        kind=row["kind"],
        year=row["year"],
        compute_capability=row["compute_capability"],
    )


def _instance(row: dict[str, Any], source: dict[str, str]) -> Instance:
    ram = row["ram_gib"]
    host = None if ram is None else int(ram * 2**30)
    return Instance(
        provider=row["provider"],
        name=row["name"],
        machine=Machine(gpu=_names()[_plain(row["gpu"])], count=row["count"], host_bytes=host),
        vcpus=row["vcpus"],
        price=row["price_usd_per_hour"],
        region=row["region"],
        date=source["date"],
        source=source["url"],
    )


@cache
def _data(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("ullage.planner") / "data" / name).read_text(encoding="utf-8"))
    return found
