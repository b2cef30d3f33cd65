"""A run plans before it loads anything: plan.json, and the config with its open keys as the plan says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from pydantic import BaseModel

from ullage.base.communicator import Communicator
from ullage.base.errors import DoesNotFitError, UllageError
from ullage.base.units import bytes_text
from ullage.config.settle import AUTO, choices_of, open_keys, plain, settled, value_of
from ullage.config.tree import Config
from ullage.model.load import source_of
from ullage.model.target import Target
from ullage.planner.corrections import Corrections
from ullage.planner.gguf_shape import shape_of_gguf
from ullage.planner.hardware import Machine
from ullage.planner.model_shape import Shape, find_shape
from ullage.planner.plan import Plan, plan
from ullage.run.machine import find_machine, place_of
from ullage.run.planned import Planned
from ullage.run.planning_cpu import plan_on_cpu
from ullage.run.predict import Prediction
from ullage.run.refusal import refusal
from ullage.run.traced_plan import TracedPlan, traced_plan
from ullage.telemetry.run_directory import RunDirectory, write_atomically
from ullage.telemetry.writer import json_text

MEASURED = {
    "rollout": ("rollout",),
    "eval": ("eval", "rollout"),
    "reward": ("reward_model",),
    "logprob": ("logprob",),
    "reference": ("reference",),
    "values": ("values",),
    "update_critic": ("update_critic",),
    "update": ("update", "optimizer_step"),
    "save": ("save",),
    "export": ("save",),
}
"""Phases as a run measures them, and those of a plan that they go through."""
OUTSIDE = ("trainer", "reward", "environment")
"""Sections of a config that change nothing of the memory a run needs, but for how many ranks share it."""


class Components(BaseModel):
    """Of one phase of a plan."""

    name: str
    components: dict[str, int]


class Document(BaseModel):
    """As much of plan.json as a run reads."""

    settings: dict[str, Any]
    """The keys that the config leaves open."""
    made_for: str
    fits: bool | None
    capacity_bytes: int
    peak_bytes: int
    planned_bytes: dict[str, int]
    scale: dict[str, float]
    phases: list[Components]


def plan_together(config: Config, directory: RunDirectory, target: Target, ranks: Communicator) -> Planned:
    """Rank 0 makes plan.json or keeps the one that is there; every rank settles by it. DoesNotFitError on all."""
    error: UllageError | None = None
    notes: list[str] = []
    if ranks.rank == 0:
        try:
            notes = prepare(config, directory.plan, target, ranks.size)
        except UllageError as problem:
            error = problem
    ranks.raise_together(error)
    found = Document.model_validate_json(directory.plan.read_bytes())
    return Planned(
        config=settled(config, found.settings),
        capacity_bytes=found.capacity_bytes,
        bytes=found.planned_bytes,
        components={phase.name: phase.components for phase in found.phases},
        scale=found.scale,
        notes=tuple(notes),
    )


def prepare(config: Config, file: Path, target: Target, ranks: int) -> list[str]:
    """Leaves a plan.json that holds for this config and machine. Returns lines for the user."""
    found = find_machine(target, config, ranks)
    notes = list(found.notes)
    if file.exists():
        reason = outdated(file, config, target, ranks, found.capacity_bytes)
        if reason is None:
            return notes
        notes.append(f"planned again: {reason}")
    scale, problem = _remembered(config, target)
    notes += problem
    try:
        made, traced, note = make_plan(find_model_shape(config), config, found.machine, target, scale)
    except DoesNotFitError:
        raise
    except Exception as error:  # noqa: BLE001 -- a model that the formulas do not know may well train
        return [*notes, _write_unplanned(file, config, target, ranks, found.capacity_bytes, _why(error))]
    document = made.as_json() | {
        "settings": {key: value_of(made.config, key) for key in open_keys(config)},
        "planned_bytes": planned_bytes(made, scale, None if traced is None else traced.traced),
        "traced": None if traced is None else traced.as_json(),
        "scale": scale,
        "made_for": _digest(config, target, ranks),
    }
    write_atomically(file, json_text(document, indent=2) + "\n")
    return [*notes, *note, f"plan: {made.verdict}"]


def outdated(file: Path, config: Config, target: Target, ranks: int, capacity: int) -> str | None:
    """Why the plan that is there does not hold here; None: it does, and a search could only change what has begun."""
    damaged = f"{file.name} is damaged"
    try:
        found = Document.model_validate_json(file.read_bytes())
    except (OSError, ValueError):
        return damaged
    if found.made_for != _digest(config, target, ranks):
        return "the config or the device has changed"
    try:
        choices_of(settled(config, found.settings))
    except (KeyError, ValueError):
        return damaged
    if found.fits and found.peak_bytes > capacity:
        return f"it needed {bytes_text(found.peak_bytes)}, there are {bytes_text(capacity)} now"
    return None


def make_plan(
    shape: Shape, config: Config, machine: Machine, target: Target, scale: Mapping[str, float]
) -> tuple[Plan, TracedPlan | None, list[str]]:
    """The plan of a run that fits, its trace on a GPU, and lines for the user.

    DoesNotFitError with the cheapest fix where nothing fits. On a CPU without a budget it may be tried as long as the
    weights fit: a host has swap, and the formulas are a GPU's.
    """
    traced: TracedPlan | None = None
    notes: list[str] = []
    if target.kind == "cpu":
        made = plan_on_cpu(shape, config, machine)
        loads = made.phases[0].total_bytes <= machine.gpu.memory_bytes
        if not made.fits and not (loads and config.memory.budget == AUTO):
            raise refusal(made)
        return made, None, []
    try:
        traced = traced_plan(shape, config, machine, target, scale)
        made = traced.plan
    except Exception as error:  # noqa: BLE001 -- closed forms know models that cannot be built from what is here
        notes = [f"planned by closed forms, not traced: {_why(error)}"]
        made = plan(shape, config, machine, scale=scale)
    if not made.fits:
        raise refusal(made)
    return made, traced, notes


def _why(error: Exception) -> str:
    return error.cause if isinstance(error, UllageError) else f"{type(error).__name__}: {error}"


def planned_bytes(made: Plan, scale: Mapping[str, float], traced: Prediction | None = None) -> dict[str, int]:
    """What each phase should measure: on a GPU what torch allocates, on a CPU the whole process."""
    whole = made.machine is not None and made.machine.gpu.kind == "cpu"
    sizes = {
        phase.name: round(phase.allocated_bytes * scale.get(phase.name, 1.0))
        + (phase.components.get("context", 0) if whole else 0)
        for phase in made.phases
    }
    parts = {name: [sizes[part] for part in parts if part in sizes] for name, parts in MEASURED.items()}
    planned = {name: max(found) for name, found in parts.items() if found}
    if traced is not None:
        seen = {name: size for name, size in traced.phases.items() if name in planned}
        planned |= {name: round(size * scale.get(name, 1.0)) for name, size in seen.items()}
    return planned


# --- models ---


def find_model_shape(config: Config) -> Shape:
    """Of the actor: from a GGUF file's header, a folder's or a downloaded config.json, or the bundled shapes."""
    path = config.actor_rollout_ref.model.path
    source = source_of(path, weights=False)
    place = Path(source["pretrained_model_name_or_path"])
    if "gguf_file" in source:
        return shape_of_gguf(place / source["gguf_file"])
    if place.is_dir():
        return find_shape(str(place))
    downloaded = try_to_load_from_cache(path, "config.json")
    return find_shape(downloaded if isinstance(downloaded, str) else path)


# --- the file ---


def _write_unplanned(file: Path, config: Config, target: Target, ranks: int, capacity: int, why: str) -> str:
    """A plan.json without phases: the run goes on with plain values. Returns a line for the user."""
    values = plain(config, target.kind)
    document = {
        "model": config.actor_rollout_ref.model.path,
        "fits": None,
        "capacity_bytes": capacity,
        "peak_bytes": 0,
        "binding_phase": None,
        "phases": [],
        "assumptions": [f"not planned: {why}"],
        "settings": {key: values[key] for key in open_keys(config)},
        "planned_bytes": {},
        "scale": {},
        "made_for": _digest(config, target, ranks),
    }
    write_atomically(file, json_text(document, indent=2) + "\n")
    return f"not planned: {why}"


def _digest(config: Config, target: Target, ranks: int) -> str:
    """Of everything that a plan follows from, but the machine's size. Keys at their defaults may come and go."""
    given: dict[str, Any] = config.model_dump(mode="json", exclude=set(OUTSIDE), exclude_defaults=True)
    text = json.dumps([given, target.kind, ranks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _remembered(config: Config, target: Target) -> tuple[dict[str, float], list[str]]:
    """Corrections by phase of the plan, and a line for the user where they cannot be read."""
    place = place_of(target, config)
    if place is None:
        return {}, []
    corrections = Corrections()
    try:
        found = corrections.scale(place)
    except ValueError:
        return {}, [f"{corrections.path} is damaged: planned without what earlier runs measured"]
    scale: dict[str, float] = {}
    for name, ratio in found.items():
        for part in MEASURED.get(name, ()):
            scale[part] = max(scale.get(part, 1.0), ratio)
    return scale, []
