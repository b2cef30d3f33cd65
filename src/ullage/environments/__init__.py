"""Environments: what answers the model between its turns, one file each, and the processes they run in. No torch here.

To add one, write `environments/my_environment.py` with a class `Environment` that has the two methods of the protocol
below. It is built once, from `environment.kwargs`, and copied for every episode: an instance plays one episode.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]
"""`role` and `content`, both texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The row of the data that an episode is about."""

    prompt: str | list[Message]
    target: Any
    source: str
    extra: dict[str, Any]
    """The row's other columns."""
    seed: int
    """For whatever the environment draws. All samples of a prompt have the same: they are compared with each other."""
    seconds: float = math.inf
    """How long each call of the episode may take; one that takes longer costs the episode."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment makes of one answer of the model."""

    observation: str | list[Message] | None = None
    """What the model reads next: messages, or text, which in a chat is a message of the user. None where it is done."""
    reward: float = 0.0
    """The episode's reward is the sum over its turns."""
    done: bool = False
    answer: str | None = None
    """What was taken for the answer, for majority votes of an evaluation."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to log as `reward/environment/<name>`, summed over the episode."""


class Environment(Protocol):
    """One episode."""

    def reset(self, row: Row) -> None:
        """Begin; the model is shown the row's prompt."""

    def step(self, action: str) -> Turn:
        """The model has answered `action`, its text without special tokens."""
