"""What `--explain` says beside the terms of each phase: of host, disk, seconds and the GPU, formula, inputs, source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from ullage.base.units import bytes_text
from ullage.planner.hardware import find_gpu, sources_of
from ullage.planner.parts import parts_of
from ullage.planner.phases import Layout
from ullage.planner.plan import REFERENCE, Plan
from ullage.planner.seconds import FORMULAS, step_work
from ullage.planner.work import Decoding, Work

HOST = {
    "process": "a rank with torch, CUDA and transformers loaded: measured",
    "optimizer": "moments and master that are not on the device, and stages of those that the host steps",
    "gradients": "2 B x P and stages, where they go to the host",
    "activations": "those that leave, in slabs of 64 MiB",
    "roles": "weights of roles that are parked",
    "checkpoint": "what is on the device of the largest file that is written",
    "load": "the largest model in its plain form, beyond what a checkpoint needs later",
    "reward_workers": "processes that score answers",
    "shared": "/dev/shm: NCCL's segments to two neighbours",
}
DISK = {
    "checkpoint": "weights, moments and master of every role that is trained",
    "kept": "trainer.max_ckpt_to_keep, the best one and the one being written",
    "final": "the actor's weights",
    "logs_of_1000_steps": "samples as text and metrics",
}
SOURCES = (
    "memory: src/ullage/planner/components.py and phases.py name where each formula comes from; constants and checks "
    "are in benchmarks/results/update_h200_*.json and tests/golden/memory_h200.json",
    "host and disk: src/ullage/planner/storage.py",
    "seconds: src/ullage/planner/seconds.py and work.py, fitted to benchmarks/results/*_h200_*.json",
)
MACHINE_FIELDS = {
    "usable_mib": "usable MiB",
    "bandwidth_gbs": "memory, GB/s",
    "tflops": "dense TFLOP/s, 16 bits",
    "interconnect_gbs": "between GPUs, both directions, GB/s",
    "pcie_generation": "PCI Express, generation",
}


def explained(made: Plan) -> Iterator[str]:
    """Section by section."""
    phases = [*made.phases, *(made.spread.phases if made.spread else ())]
    yield from ("", "parts of a phase, all of which count against the device:")
    yield from (f"  {name} = {text}" for name, text in parts_of(phases).items())
    yield from ("", "host memory of each GPU's process:")
    yield from (f"  {name} = {bytes_text(count)} = {HOST.get(name, name)}" for name, count in made.host.items())
    yield f"  pinned, of these = {bytes_text(made.pinned_bytes)} = gradients, activations, roles, streamed state"
    yield from ("", "disk:", *(f"  {name} = {bytes_text(count)} = {DISK[name]}" for name, count in made.disk.items()))
    yield from ("", "seconds:", *(f"  {text}" for text in FORMULAS))
    ranks = 1 if made.machine is None else made.machine.gpus
    layouts = [(Layout(made.shape, made.config, ranks=ranks), made.seconds)]
    if made.spread:
        layouts.append((Layout(made.shape, made.spread.config, sharding=made.spread.sharding), made.spread.seconds))
    for layout, seconds in layouts:
        told = "" if seconds is made.seconds else ", shared out"
        for name, work in step_work(layout).items():
            yield f"  {name}{told} = {seconds[name]:.1f} s  [{_inputs(work)}]"
    gpu = find_gpu(REFERENCE) if made.machine is None else made.machine.gpu
    facts = [
        f"  {MACHINE_FIELDS[field]} = {value:,.10g}: {source}"
        for field, (value, source) in sources_of(gpu).items()
        if field in MACHINE_FIELDS
    ]
    if facts:
        yield from ("", f"{gpu.name}:", *facts)
    yield from ("", "sources:", *(f"  {text}" for text in SOURCES))


def _inputs(work: Work) -> str:
    """What a phase has to do, without what it has not."""
    told = []
    for field in fields(work):
        value = getattr(work, field.name)
        if isinstance(work, Decoding) and field.name == "prefill":
            told.append(f"prefill: {_inputs(value)}")
        elif value and not isinstance(value, bool):
            told.append(f"{field.name}={value:,.4g}")
    return ", ".join(told)
