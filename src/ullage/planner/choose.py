"""Keys that are left open, filled: of all combinations that fit the memory there is, the one that is fastest.

A plainer one, with fewer levers pulled, is taken where that costs no more than a hundredth of the time. None of them
changes what is learned. Phases share what stays on the device and are independent beside it, so that a
combination's memory and time are sums of parts, each of which depends on few keys and is worked out once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any, NamedTuple

from ullage.base.units import bytes_of
from ullage.config.settle import AUTO, PATHS, open_keys, value_of
from ullage.config.tree import Config
from ullage.planner import components as c
from ullage.planner.hardware import GPU, Machine
from ullage.planner.model_shape import Shape
from ullage.planner.phases import Layout, Phase
from ullage.planner.reasons import Reasons
from ullage.planner.seconds import forward_work, optimizer_work, parking_work, sampling_work, step_seconds, update_work
from ullage.planner.sharding import Sharding
from ullage.planner.work import Work

RECOMPUTED: tuple[object, ...] = ("none", "matmuls", *(eighths / 8 for eighths in range(1, 8)), "full")
SHARES = (0.2, 0.36, 0.6)
"""Of layers whose activations leave where none runs again as a whole: PCIe hides about a third of them."""
TOKENS = tuple(count << power for power in range(4, 15) for count in (2, 3))[:-1]
"""Of a pass: 32, 48, 64, 96 ... 24576, 32768."""
SLOTS = (8, 16, 32, 64, 128, 256)
FEW_SLOTS, LONG = (1, 2, 4), 16384
"""Fewer, where sequences may have so many tokens that the cache of eight may be too large."""
DECODING = ("rollout", "eval")
"""Phases that depend on slots."""
NO_SCALE: Mapping[str, float] = {}
WORTH = 0.01
"""Share of a step's time below which a lever is not pulled for it."""
PLAIN: Mapping[str, object] = {
    "optimizer_state": "device",
    "gradients": "weights",
    "offload_roles": False,
    "recompute": "none",
    "activation_offload": "none",
}
"""Levers, let go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What every open key becomes, and why."""

    values: dict[str, object]
    why: dict[str, str]
    fits: bool


class Held(NamedTuple):
    """Choices that say what stays on the device."""

    optimizer_state: str
    gradients: str
    offload_roles: bool
    slots: int


class Made(NamedTuple):
    """Choices that say what a pass makes."""

    tokens: int
    recompute: object
    activation_offload: str
    activation_share: float


class Limit(NamedTuple):
    """What a pass leaves to what stays on the device, and what it takes of the host."""

    resident_bytes: float
    host_bytes: int


class Way(NamedTuple):
    """A combination, its seconds, and how many bytes it is below what there is; less than nothing: above."""

    held: Held
    made: Made
    seconds: float
    spare_bytes: float
    host_bytes: int

    @property
    def levers(self) -> int:
        return levers_of(self.held) + levers_of(self.made)

    @property
    def values(self) -> dict[str, object]:
        """By path in the config."""
        return {PATHS[name]: value for name, value in (self.held._asdict() | self.made._asdict()).items()}

    def fits(self, host: int | None) -> bool:
        return self.spare_bytes >= 0 and (host is None or self.host_bytes <= host)


@cache
def levers_of(part: Held | Made) -> int:
    """How many are pulled."""
    return sum(getattr(part, name, plain) != plain for name, plain in PLAIN.items())


def choose(shape: Shape, config: Config, machine: Machine, *, scale: Mapping[str, float] = NO_SCALE) -> Choice:
    """The fastest combination that fits, up to `WORTH`; where none does, the one that needs least.

    No lever of it that is let go leaves a combination that fits and is faster; no other step of the tokens of a pass,
    of the slots or of the share of layers that run again fits and is faster by more than `WORTH`.

    Args:
        scale: measured over predicted memory of earlier runs on this machine, by phase.
    """
    space = Space(shape, config, machine.gpus)
    host = host_limit(machine)
    capacity = capacity_of(config, machine)
    way, fits = space.best(machine.gpu, capacity, host, scale)
    values, opened = way.values, open_keys(config)
    reasons = Reasons(space, way, machine.gpu, capacity, host, scale)
    why = {path: reasons.of(name, fits=fits) for name, path in PATHS.items() if path in opened}
    return Choice(values={key: values[key] for key in opened}, why=why, fits=fits)


def capacity_of(config: Config, machine: Machine) -> int:
    """Bytes of one GPU that the run may use."""
    budget = bytes_of(config.memory.budget)
    return machine.gpu.memory_bytes if budget is None else min(budget, machine.gpu.memory_bytes)


def host_limit(machine: Machine) -> int | None:
    """Bytes of host memory for each rank, where known."""
    return None if machine.host_bytes is None else machine.host_bytes // machine.count


def with_slack(phase: Phase, scale: Mapping[str, float] = NO_SCALE) -> Phase:
    """The phase with what the allocator needs beyond what is allocated, and what earlier runs measured beyond it."""
    ratio = scale.get(phase.name, 1.0)
    formula = f"{c.SLACK:.0%} of what is allocated, expandable segments"
    if ratio != 1.0:
        formula += f"; {ratio - 1:+.1%} as measured in earlier runs here"
    slack = c.term("slack", ((1 + c.SLACK) * ratio - 1) * phase.allocated_bytes, formula)
    return replace(phase, terms=(*phase.terms, slack))


def peak_phase(layout: Layout, scale: Mapping[str, float] = NO_SCALE) -> Phase:
    """The largest, slack included."""
    return max((with_slack(phase, scale) for phase in layout.phases()), key=lambda phase: phase.total_bytes)


class Space:
    """All combinations of a config's open keys; keys that have a value keep it. Whole replicas, unless shared out."""

    def __init__(self, shape: Shape, config: Config, ranks: int, sharding: Sharding | None = None) -> None:
        self.base = Layout(shape, config, ranks=ranks, sharding=sharding)
        self._given = {name: value_of(config, path) for name, path in PATHS.items()}
        self._layouts: dict[tuple[Held, Made], Layout] = {}

    def layout(self, held: Held, made: Made) -> Layout:
        """The base with other choices, without reading the config again; memory, host and time share what it finds."""
        if (held, made) not in self._layouts:
            layout = self._layouts[held, made] = copy.copy(self.base)
            layout.chosen = self.base.chosen.model_copy(update=held._asdict() | made._asdict())
            layout.parked = held.offload_roles
        return self._layouts[held, made]

    def peak(self, held: Held, made: Made, scale: Mapping[str, float]) -> Phase:
        """The phase that needs most."""
        return peak_phase(self.layout(held, made), scale)

    def seconds(self, held: Held, made: Made, gpu: GPU) -> float:
        """Of a step."""
        return sum(step_seconds(self.layout(held, made), gpu).values())

    # --- what there is to choose from; the first of each is a run that needs no memory saved ---

    def _options(self, name: str, *values: object) -> tuple[Any, ...]:
        given = self._given[name]
        return values if given == AUTO else (given,)

    @cached_property
    def held(self) -> tuple[Held, ...]:
        base = self.base
        others = base.reference or base.critic is not None or base.reward_model is not None
        adapters = base.actor.rank > 0 and (base.critic is None or base.critic.rank > 0)
        parts = product(
            # A step of the host's cores would be twice as slow as streaming, for the memory of two stages.
            self._options("optimizer_state", "device", "streamed"),
            self._options("gradients", *(("weights",) if adapters else ("weights", "host"))),
            self._options("offload_roles", *((False, True) if others else (False,))),
            self._options("slots", *reversed(self.slots)),
        )
        return tuple(Held(*part) for part in parts)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Up to one for each sample."""
        data, n = self.base.config.data, self.base.config.actor_rollout_ref.rollout.n
        samples = -(-data.train_batch_size // self.base.sharding.data) * n
        counts = (*FEW_SLOTS, *SLOTS) if self.base.longest >= LONG else SLOTS
        below = tuple(count for count in counts if count < samples)
        return (*below, samples) if samples <= SLOTS[-1] else below

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """From the longest sequence to a whole mini-batch."""
        base, data = self.base, self.base.config.data
        n = 1 if base.supervised else base.config.actor_rollout_ref.rollout.n
        prompts = base.config.actor_rollout_ref.actor.ppo_mini_batch_size or data.train_batch_size
        whole = -(-prompts // base.sharding.data) * (data.max_prompt_length + n * data.max_response_length)
        found = [base.longest]
        for count in TOKENS:
            if count > 1.2 * found[-1] and found[-1] < whole:
                found.append(count)
        return tuple(found)

    @cached_property
    def made(self) -> tuple[Made, ...]:
        tokens = self._options("tokens", *reversed(self.tokens))
        return tuple(Made(count, *layers) for count in tokens for layers in self._layers())

    def _layers(self) -> Iterator[tuple[object, str, float]]:
        """What becomes of activations. Where some layers run again, what leaves is a mixture that no form describes."""
        # Compiled layers make what is cheap again in any case.
        remade = self.base.shape.remakes and not self.base.config.memory.compile
        for recompute in self._options("recompute", *(r for r in RECOMPUTED if remade or r != "matmuls")):
            for offload in self._options("activation_offload", "none", "async"):
                if offload == "none":
                    yield recompute, offload, self._options("activation_share", 1.0)[0]
                elif recompute in ("none", "matmuls", "full") or self._given["activation_offload"] != AUTO:
                    shares = (1.0,) if recompute == "full" else SHARES
                    yield from ((recompute, offload, share) for share in self._options("activation_share", *shares))

    # --- parts of memory and time ---

    def _beside(self, held: Held, made: Made) -> dict[str, int]:
        """What each phase has beside what stays."""
        resident = self.resident[held][0]
        return {phase.name: phase.allocated_bytes - resident for phase in self.layout(held, made).phases()}

    @cached_property
    def beside(self) -> dict[tuple[bool, Made], dict[str, int]]:
        """Bytes beside what stays, of each phase that does not decode: what passes make, and roles that come for it."""
        first, plain = self.held[0], self.made[0]
        parking = dict.fromkeys(held.offload_roles for held in self.held)
        here = {roles: self._beside(first._replace(offload_roles=roles), plain) for roles in parking}
        found = {}
        for made in self.made:
            own = {name: count for name, count in self._beside(first, made).items() if not self._decodes(name)}
            for roles, counts in here.items():  # who comes does not depend on what passes make
                came = {name: counts[name] - here[first.offload_roles][name] for name in own}
                found[roles, made] = {name: count + came[name] for name, count in own.items()}
        return found

    @cached_property
    def decoding(self) -> dict[int, dict[str, int]]:
        """The same of phases that do, by slots."""
        found = {}
        for slots, held in {held.slots: held for held in self.held}.items():
            own = self._beside(held, self.made[0])
            found[slots] = {name: count for name, count in own.items() if self._decodes(name)}
        return found

    @cached_property
    def pools(self) -> dict[int, int]:
        """Bytes that are reserved for captured steps, by slots."""
        return {held.slots: sum(t.bytes for t in self.layout(held, self.made[0]).graphs()) for held in self.held}

    def _decodes(self, phase: str) -> bool:
        return phase in DECODING and not self.base.supervised

    @cached_property
    def resident(self) -> dict[Held, tuple[int, int]]:
        """Bytes that stay on the device and on the host, without activations there."""
        found = {}
        for held in self.held:
            layout = self.layout(held, self.made[0])
            host = layout.host()
            found[held] = sum(t.bytes for t in layout.resident()), sum(host.values()) - host["activations"]
        return found

    @cached_property
    def away(self) -> dict[Made, int]:
        """Bytes of activations on the host."""
        return {made: self.layout(self.held[0], made).host()["activations"] for made in self.made}

    @cached_property
    def work(self) -> tuple[dict[Any, list[Work]], ...]:
        """Of the rollout by slots, of the optimizer and parking by what stays, of passes by what they make."""
        first, plain = self.held[0], self.made[0]
        slots = {held.slots: list(sampling_work(self.layout(held, plain)).values()) for held in self.held}
        stays = {}
        for held in dict.fromkeys(held._replace(slots=first.slots) for held in self.held):
            layout = self.layout(held, plain)
            stays[held] = [*optimizer_work(layout).values(), *parking_work(layout).values()]
        forward = {
            made.tokens: list(forward_work(self.layout(first, made)).values())
            for made in {made.tokens: made for made in self.made}.values()
        }
        passes = {}
        for gradients, made in product(dict.fromkeys(held.gradients for held in self.held), self.made):
            layout = self.layout(first._replace(gradients=gradients), made)
            passes[gradients, made] = [*update_work(layout).values(), *forward[made.tokens]]
        return slots, stays, passes

    # --- the search ---

    def best(
        self, gpu: GPU, capacity: int, host: int | None, scale: Mapping[str, float] = NO_SCALE
    ) -> tuple[Way, bool]:
        """The fastest that fits, or a plainer one that is as fast but for `WORTH`, and True; or what needs least: of
        the host, where that has too little for any."""
        ways = self.ways(gpu, capacity, host, scale)
        fitting = sorted((way for way in ways if way.fits(host)), key=lambda way: round(way.seconds, 6))

        def holds(way: Way) -> bool:
            """The parts are taken from sums that need not be sums of parts: these have the last word."""
            layout = self.layout(way.held, way.made)
            enough = host is None or sum(layout.host().values()) <= host
            return enough and peak_phase(layout, scale).total_bytes <= capacity

        fastest = next(filter(holds, fitting), None)
        if fastest is not None:
            near = [way for way in fitting if fastest.seconds <= way.seconds <= (1 + WORTH) * fastest.seconds]
            plainer = sorted((way for way in near if way.levers < fastest.levers), key=lambda way: way.levers)
            return next(filter(holds, plainer), fastest), True
        affordable = [way for way in ways if host is None or way.host_bytes <= host]
        if affordable:
            return max(affordable, key=lambda way: (way.spare_bytes, -way.seconds)), False
        roomy = self.ways(gpu, capacity, None, scale)
        return min([way for way in roomy if way.fits(None)] or roomy, key=lambda way: way.host_bytes), False

    def ways(self, gpu: GPU, capacity: int, host: int | None, scale: Mapping[str, float] = NO_SCALE) -> list[Way]:
        """For everything that can stay, and each number of levers, the fastest passes that fit beside it; or those
        that need least."""
        free = capacity - c.CONTEXT
        seconds_slots, seconds_stays, seconds_passes = (
            {key: sum(work.seconds(gpu) for work in parts) for key, parts in table.items()} for table in self.work
        )

        def left(own: Mapping[str, int]) -> float:
            """Bytes that may stay, beside what each of these phases has of its own."""
            room = (free / ((1 + c.SLACK) * scale.get(name, 1.0)) - count for name, count in own.items())
            return min(room, default=math.inf)

        passes: dict[tuple[str, bool], list[tuple[float, Limit, Made]]] = {}
        kinds = dict.fromkeys(held.gradients for held in self.held)
        for (roles, made), own in self.beside.items():
            limit = Limit(left(own), self.away[made])
            for kind in kinds:
                passes.setdefault((kind, roles), []).append((seconds_passes[kind, made], limit, made))
        passes = {kind: _undominated(listed) for kind, listed in passes.items()}
        found: list[Way] = []
        for held, (resident, on_host) in self.resident.items():
            room = left(self.decoding[held.slots])
            pool = self.pools[held.slots] / (1 + c.SLACK)
            stays = seconds_slots[held.slots] + seconds_stays[held._replace(slots=self.held[0].slots)]
            listed = passes[held.gradients, held.offload_roles]
            plainest = min(levers_of(made) for _, _, made in listed)
            best: Way | None = None
            fitting: dict[int, Way] = {}
            for seconds, limit, made in listed:
                spare = min(room, limit.resident_bytes) - resident - pool
                way = Way(held, made, stays + seconds, spare, on_host + limit.host_bytes)
                if way.fits(host) and all(levers_of(made) < plainer for plainer in fitting):
                    fitting[levers_of(made)] = way
                if plainest in fitting:
                    break
                if best is None or spare > best.spare_bytes:
                    best = way
            found += fitting.values() or filter(None, [best])
        return found


def _undominated(passes: list[tuple[float, Limit, Made]]) -> list[tuple[float, Limit, Made]]:
    """By time, without those that leave no more of device and host than a faster one that is as plain does."""
    found: list[tuple[float, Limit, Made]] = []
    for each in sorted(passes, key=lambda each: round(each[0], 6)):
        _, limit, made = each
        if not any(
            other.resident_bytes >= limit.resident_bytes
            and other.host_bytes <= limit.host_bytes
            and levers_of(plainer) <= levers_of(made)
            for _, other, plainer in found
        ):
            found.append(each)
    return found
