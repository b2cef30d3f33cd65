"""A run of some model on no machine in particular, worked out: nothing is chosen, keys that are not given are plain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, cached_property

from ullage.base.units import bytes_text
from ullage.config.load import load_mapping
from ullage.planner.choose import with_slack
from ullage.planner.components import Term
from ullage.planner.hardware import find_gpu
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout, Phase
from ullage.planner.plan import REFERENCE
from ullage.planner.seconds import step_seconds

GIB = 1 << 30
Settings = Mapping[str, object]


class Worked:
    """What `ullage plan` says about a model and some keys, without the levers, and therefore soon."""

    def __init__(self, model: str, settings: Settings) -> None:
        self._layout = Layout(find_shape(model), load_mapping(settings).config)
        self._command = f"ullage plan {model} --explain {' '.join(written(settings))}"

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(with_slack(phase) for phase in self._layout.phases())

    @cached_property
    def binding(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.binding.total_bytes

    @property
    def allocated_bytes(self) -> int:
        """Of the largest phase, as torch counts."""
        return max(phase.allocated_bytes for phase in self.phases)

    @property
    def host_bytes(self) -> int:
        return sum(self._layout.host().values())

    @cached_property
    def step_seconds(self) -> float:
        """On one GPU of the kind that times are told for where none is named."""
        return sum(step_seconds(self._layout, find_gpu(REFERENCE)).values())

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    def explained(self) -> str:
        """The command, the binding phase term by term, and the totals of the others."""
        binding = self.binding
        others = ", ".join(f"{phase.name} {gib(phase.total_bytes)}" for phase in self.phases if phase is not binding)
        lines = [
            f"    {self._command}",
            "",
            f"`{binding.name}` binds with {gib(binding.total_bytes)}, of which {gib(binding.allocated_bytes)} are "
            f"allocated. Other phases: {others}. Host memory {gib(self.host_bytes)}.",
            "",
            term_table(binding.terms),
            "",
            f"Assumed: {'; '.join(self._layout.assumptions)}.",
        ]
        return "\n".join(lines)


def worked(model: str, settings: Settings) -> Worked:
    return _worked(model, tuple(settings.items()))


@cache
def _worked(model: str, settings: tuple[tuple[str, object], ...]) -> Worked:
    return Worked(model, dict(settings))


def written(settings: Settings) -> list[str]:
    """As a prompt and a config take them."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


def term_table(terms: Iterable[Term]) -> str:
    rows = [f"| {each.name} | {bytes_text(each.bytes)} | `{each.explained()}` |" for each in terms if each.bytes]
    return "\n".join(["| component | bytes | formula and inputs |", "| --- | --- | --- |", *rows])


def gib(count: float) -> str:
    return f"{count / GIB:,.1f} GiB"
