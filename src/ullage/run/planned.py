"""What a rank takes from plan.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ullage.config.tree import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan as a run carries it out."""

    config: Config
    """With no key left open."""
    capacity_bytes: int | None = None
    """Of its device, as far as it may be used."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    """By phase as it is measured."""
    components: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By phase as it is planned."""
    scale: Mapping[str, float] = field(default_factory=dict)
    """What earlier runs had measured over their plans, which this plan is corrected by."""
    notes: tuple[str, ...] = ()
    """For the user."""
