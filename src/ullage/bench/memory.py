"""The planner against real steps: random configs are drawn, predicted, and only then measured and run under caps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import psutil
import torch
from transformers import AutoConfig

from ullage.base.errors import UsageError
from ullage.bench.clock import free, synchronize
from ullage.bench.fit import capped
from ullage.bench.memory_draws import MODELS, SMALL, Draw, capped_first, draws, seconds, step_host_bytes
from ullage.bench.memory_records import CAP, DRAWN, MEASURED, PREDICTED, Records, provenance
from ullage.bench.memory_workers import Job, Room, one_by_one, side_by_side
from ullage.bench.report import GIB
from ullage.bench.rivals import RIVALS
from ullage.engine.measure import MemoryProbe
from ullage.engine.replay import is_out_of_memory
from ullage.model.target import Target
from ullage.planner.hardware import GPU, find_gpu
from ullage.planner.seconds import step_seconds
from ullage.run.traced_plan import stand_in_of

SHARE = 1.15
"""Of the predicted least capacity, which a config gets for itself where several run at once."""
FACTORS = (1.03, 0.97)
"""Of the predicted least capacity: a run must go through under the first and fail under the second."""
CONTEXT = 2 * GIB
"""What a process needs for itself, on the device and on the host."""
OTHER_DEVICE = 0.01
"""Share by which the memory of two GPUs of one kind may differ."""
Say = Callable[[str], None]


class Predicted(Protocol):
    """What a trace says."""

    @property
    def phases(self) -> dict[str, int]: ...
    @property
    def least_bytes(self) -> int | None: ...
    @property
    def host_bytes(self) -> int: ...


class Phases:
    """Peaks and seconds of each phase of a step; a phase inside another has its own, and the outer one goes on."""

    def __init__(self, target: Target) -> None:
        self.target, self.probe = target, MemoryProbe(target)
        self.found: dict[str, dict[str, float]] = {}
        self.device_bytes = 0
        self.open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._note()
        self.open.append(name)
        yield  # a phase that fails stays open, and so tells where
        self._note()
        self.open.pop()

    def most(self, kind: str) -> int:
        """Of all phases."""
        return int(max((phase[kind] for phase in self.found.values()), default=0))

    def _note(self) -> None:
        """What happened since the last note belongs to the innermost phase that is open."""
        synchronize(self.target)
        now = time.perf_counter()
        if self.open:
            allocated, reserved, _ = self.probe.end_phase()
            phase = self.found.setdefault(self.open[-1], {"allocated": 0, "reserved": 0, "seconds": 0.0})
            phase["allocated"] = max(phase["allocated"], allocated)
            phase["reserved"] = max(phase["reserved"], reserved)
            phase["seconds"] = round(phase["seconds"] + now - self._since, 4)
            if self.target.kind == "cuda":
                left, whole = torch.cuda.mem_get_info(self.target.device)
                self.device_bytes = max(self.device_bytes, whole - left)
        self.probe.start_phase()
        self._since = now


Predictor = Callable[[Draw, GPU], Predicted]
Rehearse = Callable[[Draw, Target, Phases], None]


def trace(draw: Draw, gpu: GPU) -> Predicted:
    """The real phases on a device without bytes."""
    from ullage.run.predict import predict

    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[draw.model]), encoding="utf-8")
        return predict(draw.config, folder, stand_in_of(gpu))


def rehearse(draw: Draw, target: Target, phases: Phases) -> None:
    """One step of the config with random weights and every sequence as long as it may be."""
    from ullage.run.rehearsal import Rehearsal

    fields = dict(MODELS[draw.model])
    Rehearsal(
        draw.config, AutoConfig.for_model(fields.pop("model_type"), **fields), target, phases, mix="fullest"
    ).step()


def load() -> None:
    """Nothing more: a process that is asked for it has imported this module, and with it all that `rehearse` needs."""


def gpu_of(target: Target, name: str | None) -> GPU:
    """The GPU that is predicted for: the one that is here, or the one that is named."""
    if name is not None:
        return find_gpu(name)
    if target.kind != "cuda":
        return find_gpu("h200")
    called = torch.cuda.get_device_name(target.device)
    try:
        found = find_gpu(called)
    except UsageError:  # one that no data file knows yet
        found = find_gpu(f"{target.memory_bytes // GIB}GiB")
    major, minor = target.capability
    return replace(found, memory_bytes=target.memory_bytes, compute_capability=f"{major}.{minor}")


@dataclass
class Bench:
    """One file of records and what it still lacks."""

    records: Records
    gpu: GPU
    seed: int
    configs: list[Draw]
    seconds_left: Callable[[], float] = lambda: float("inf")
    say: Say = lambda line: None
    predictor: Predictor = trace
    rehearse: Rehearse = rehearse
    origin: dict[str, Any] = field(default_factory=provenance)
    failures: list[str] = field(default_factory=list)
    """What could not be done, for want of an earlier part or because it failed by itself."""
    workers: int = 1
    """Configs that are measured at once, each in a process of its own: their memory is their own, their time is not."""

    def estimate(self, caps: int) -> float:
        """Seconds of measuring everything on an H200."""
        twice = capped_first(self.configs, self.seed, caps)
        return sum(sum(seconds(draw).values()) for draw in [*self.configs, *twice, *twice])

    def predict(self) -> bool:
        """Append the predictions that are missing; False where time ran out before the last."""
        for draw in self.configs:
            if self.records.find(PREDICTED, draw.key):
                continue
            if self.seconds_left() <= 0:
                return False
            try:
                row = predicted(draw, self.gpu, self.predictor)
            except Exception as error:  # noqa: BLE001 -- told when the others are done
                self._failed("predict", draw, error)
                continue
            self.records.append(PREDICTED, row | self.origin)
            least, taken = row["least_bytes"] / GIB, row["seconds"]["trace"]
            self.say(f"predicted {draw.number}: {draw.text}: least {least:.2f} GiB, {taken:.1f} s")
        return True

    def measure(self, target: Target) -> bool:
        """One step of every config that has not been measured; one without a prediction is left out."""
        self._check(target)
        jobs = []
        for draw in self.configs:
            promised = self.records.find(PREDICTED, draw.key)
            if promised is None:
                self.failures.append(f"measure {draw.number}: it has no prediction")
            elif not self.records.find(MEASURED, draw.key):
                share = int(SHARE * promised["least_bytes"]) if self.workers > 1 else None
                jobs.append(_job(draw, promised, SHARE, partial(measured, draw, target, self.rehearse, share)))
        return self._done(jobs, target)

    def caps(self, target: Target, count: int) -> bool:
        """Some of the configs that ran, each at both caps."""
        self._check(target)
        jobs = []
        for draw in capped_first(self.configs, self.seed, count):
            promised, known = self.records.find(PREDICTED, draw.key), self.records.find(MEASURED, draw.key)
            if promised is None or known is None:
                self.failures.append(f"cap {draw.number}: it has not been measured")
                continue
            done = {row["factor"] for row in self.records.of(CAP) if row["key"] == draw.key}
            for factor in FACTORS if known["ran"] else ():
                if factor not in done:
                    cap = int(factor * promised["least_bytes"])
                    work = partial(under_cap, draw, target, cap, self.rehearse)
                    jobs.append(replace(_job(draw, promised, factor, work), factor=factor))
        return self._done(jobs, target)

    def _done(self, jobs: list[Job], target: Target) -> bool:
        """Work them off, and write down what each found; False where time ran out before the last."""
        if self.workers > 1:
            room = Room(int(0.97 * target.memory_bytes), int(0.85 * psutil.virtual_memory().available))
            outcomes = side_by_side(jobs, self.workers, room, self.seconds_left, load=load)
        else:
            outcomes = one_by_one(jobs, self.seconds_left)
        done = 0
        for job, row in outcomes:
            done += 1
            draw, part = self.configs[job.number], "measure" if job.factor is None else "cap"
            if isinstance(row, Exception):
                self._failed(part, draw, row)
            elif job.factor is None:
                self.records.append(MEASURED, row | self.origin | {"workers": self.workers})
                peak = f"{row['allocated_bytes'] / GIB:.2f} GiB in {row['seconds']:.1f} s"
                self.say(f"measured {draw.number}: {draw.text}: {row['why'] or peak}")
            else:
                self.records.append(CAP, {"factor": job.factor, **row, **self.origin})
                self.say(f"cap {job.factor:g} x: {row['cap_bytes'] / GIB:.2f} GiB: {row['why'] or 'ran'}")
        return done == len(jobs)

    def _failed(self, part: str, draw: Draw, error: Exception) -> None:
        """A config that fails, but for lack of memory, leaves no record and does not keep the others waiting."""
        self.failures.append(f"{part} {draw.number}: {type(error).__name__}: {str(error).splitlines()[0]}")
        self.say(f"{self.failures[-1]} ({draw.text})")

    def _check(self, target: Target) -> None:
        if target.kind == "cpu" and any(draw.model not in SMALL for draw in self.configs):
            raise UsageError(
                f"{self.records.path} holds configs for {self.gpu.name}, and no GPU can be used here",
                "measure on such a machine; --only predict works on this one",
            )
        if target.kind == "cuda" and abs(target.memory_bytes / self.gpu.memory_bytes - 1) > OTHER_DEVICE:
            raise UsageError(
                f"{self.records.path} holds predictions for {self.gpu.name}, {self.gpu.memory_bytes / GIB:.1f} GiB; "
                f"this GPU has {target.memory_bytes / GIB:.1f}",
                "give another file with --out",
            )


def _job(draw: Draw, promised: dict[str, Any], factor: float, work: Callable[[], dict[str, Any]]) -> Job:
    needed = int(factor * promised["least_bytes"]) + CONTEXT
    return Job(work, draw.number, sum(seconds(draw).values()), needed, promised["host_bytes"] + CONTEXT)


def start(path: Path, target: Target, *, count: int | None, seed: int | None, gpu: str | None) -> Bench:
    """The draw that the file holds, or a new one written to it: what is measured was fixed before."""
    records = Records(path)
    known = next(iter(records.of(DRAWN)), None)
    if known is not None:
        for name, given, kept in (("seed", seed, known["seed"]), ("configs", count, len(known["configs"]))):
            if given is not None and given != kept:
                raise UsageError(f"{path} was drawn with --{name} {kept}, not {given}", "give another file with --out")
        device = known["device"]
        found = replace(find_gpu(device["gpu"]), memory_bytes=device["memory_bytes"])
        configs = [Draw(number, *row) for number, row in enumerate(known["configs"])]
        return Bench(records, found, known["seed"], configs)
    found, seed = gpu_of(target, gpu), 1 if seed is None else seed
    small = is_small(target, gpu)
    configs = draws(count or (3 if small else 60), seed, found.memory_bytes, small=small)
    drawn = [[draw.model, dict(draw.settings)] for draw in configs]
    device = {"gpu": found.name, "memory_bytes": found.memory_bytes}
    records.append(DRAWN, {"seed": seed, "device": device, "configs": drawn, **provenance()})
    return Bench(records, found, seed, configs)


def is_small(target: Target, gpu: str | None) -> bool:
    """A CPU runs the same code on a tiny model: a check that it works, not a measurement."""
    return target.kind == "cpu" and gpu is None


def short_name(target: Target, gpu: str | None) -> str:
    """For a file: `h200`, `rtx_4090`."""
    return "cpu" if is_small(target, gpu) else gpu_of(target, gpu).name.lower().replace(" ", "_")


def predicted(draw: Draw, gpu: GPU, predictor: Predictor) -> dict[str, Any]:
    """Everything that anybody says about the config before it runs."""
    began = time.perf_counter()
    layout = replace(draw).layout  # a copy has worked out nothing yet
    phases = {phase.name: phase.allocated_bytes for phase in layout.phases()}
    closed = time.perf_counter() - began
    traced = predictor(draw, gpu)
    assert traced.least_bytes is not None, "a trace through every layer"
    taken = {"closed form": closed, "trace": time.perf_counter() - began - closed}
    return {
        "key": draw.key,
        "number": draw.number,
        "model": draw.model,
        "method": draw.method,
        "text": draw.text,
        "settings": dict(draw.settings),
        "closed_form": phases,
        "closed_form_host_bytes": step_host_bytes(layout),
        "trace": dict(traced.phases),
        "least_bytes": traced.least_bytes,
        "host_bytes": traced.host_bytes,
        "rivals": {name: rule(layout) for name, rule in RIVALS.items()},
        "step_seconds": {name: round(value, 4) for name, value in step_seconds(layout, gpu).items()},
        "seconds": {name: round(value, 4) for name, value in taken.items()},
    }


def measured(draw: Draw, target: Target, work: Rehearse, share: int | None = None) -> dict[str, Any]:
    """One step on the device as it is, or with so many bytes of it where others run beside."""
    with capped(share and share / GIB, target):
        row = _measured(draw, target, work)
    return row if share is None else row | {"device_bytes": 0}  # of the whole device


def _measured(draw: Draw, target: Target, work: Rehearse) -> dict[str, Any]:
    cleared(target)
    before = torch.cuda.memory_allocated(target.device) if target.kind == "cuda" else 0
    host = MemoryProbe(Target("cpu", 0, (0, 0), 0))  # the process's resident memory; what is pinned is part of it
    host.start_phase()
    host_before = host.owners["context"]
    phases, why, taken = _attempted(draw, target, work)
    resident, _, _ = host.end_phase()
    if target.kind == "cpu":  # its phases have reset that peak
        resident = max(resident, phases.most("allocated"))
    return {
        "key": draw.key,
        "number": draw.number,
        "ran": why is None,
        "why": why,
        "phases": phases.found,
        "allocated_bytes": phases.most("allocated"),
        "reserved_bytes": phases.most("reserved"),
        "device_bytes": phases.device_bytes,
        "before_bytes": before,
        "host_bytes": resident,
        "host_before_bytes": host_before,
        "pinned_pool_bytes": _pinned_pool(target),
        "seconds": round(taken, 3),
    }


def under_cap(draw: Draw, target: Target, cap_bytes: int, work: Rehearse) -> dict[str, Any]:
    """One step where torch may take so many bytes of the device; a CPU has no cap."""
    cleared(target)
    with capped(cap_bytes / GIB, target):
        _, why, taken = _attempted(draw, target, work)
    return {
        "key": draw.key,
        "number": draw.number,
        "cap_bytes": cap_bytes,
        "ran": why is None,
        "why": why,
        "seconds": round(taken, 3),
    }


def _attempted(draw: Draw, target: Target, work: Rehearse) -> tuple[Phases, str | None, float]:
    """What was measured, why it ran out of memory if it did, and the seconds it took."""
    phases, why = Phases(target), None
    began = time.perf_counter()
    try:
        work(draw, target, phases)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        where = phases.open[-1] if phases.open else "making the roles"
        why = f"{where}: {str(error).splitlines()[0]}"
    return phases, why, time.perf_counter() - began


def cleared(target: Target) -> None:
    """Nothing of the row before: neither its tensors nor the workspaces that cuBLAS took from the allocator."""
    free(target)
    if target.kind == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_host_memory_stats()


def _pinned_pool(target: Target) -> int:
    """Peak of torch's own pool of pinned memory; buffers that the engine registers are not in it."""
    if target.kind != "cuda":
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
