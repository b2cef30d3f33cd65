"""What a session knows of the requests it serves: groups of samples that begin from one prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ullage.rollout.embedded.pages import PAGE_SIZE, pages_for
from ullage.rollout.embedded.state import LEAST_MEMBERS, MEMBERS
from ullage.rollout.sampling import Sampling

SHARED_LEAST = 128
"""Tokens of a shared beginning that are worth reading apart from the rest."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn of one sample since it was last seen."""

    key: Hashable
    index: int
    """Which seed of the request."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    """`stop` (an end token, included) or `length` with the last of its tokens."""
    supports: Sequence[Tensor] = ()
    """For each token the ids it was drawn from, where they were asked for and not all."""


@dataclass(slots=True, eq=False)
class Group:
    """A request: its prompt, in the cache while samples wait to begin from it."""

    key: Hashable
    prompt: tuple[int, ...]
    sampling: Sampling
    limit: int
    """Tokens of a sample."""
    samples: list[Run] = field(default_factory=list)
    unstarted: int = 0
    unfinished: int = 0
    pages: list[int] = field(default_factory=list)
    last_hidden: Tensor | None = None
    """What first tokens are drawn from."""

    @property
    def keeps_supports(self) -> bool:
        return self.sampling.keep_supports and self.sampling.truncates


@dataclass(slots=True, eq=False)
class Run:
    """A sample: waiting, in a row, or gone from its row with tokens still on their way to the host."""

    group: Group
    index: int
    seed: int
    tokens: list[int] = field(default_factory=list)
    """Those that the host has seen."""
    bound: int = 0
    """Tokens that the device may have drawn."""
    pages: list[int] = field(default_factory=list)
    entered: int = 0
    """Pages that the device knows of."""
    row: int = 0
    """Its place when the device's rows were last put in order."""
    seated: bool = False
    age: int = 0
    """Its place in the order of first admission; 0: not yet."""

    @property
    def whole_pages(self) -> int:
        """Of its prompt."""
        return len(self.group.prompt) // PAGE_SIZE

    @property
    def is_fresh(self) -> bool:
        return not self.tokens

    def reach(self, steps: int) -> int:
        """The most tokens in the cache after so many steps: all that are drawn but the last."""
        return len(self.group.prompt) + min(self.group.limit, max(1, self.bound) + steps) - 1

    def missing_pages(self, steps: int) -> int:
        """Those it has not got that so many steps may need."""
        return max(0, pages_for(self.reach(steps)) - len(self.pages))

    def add(self, token_ids: list[int], stop_ids: frozenset[int]) -> str | None:
        """Note what was drawn; says why the sample ends, if it does."""
        self.tokens += token_ids
        if token_ids[-1] in stop_ids and not self.group.sampling.ignore_eos:
            return "stop"
        return "length" if len(self.tokens) == self.group.limit else None


def shared_beginnings(rows: Sequence[Run]) -> tuple[list[int], list[list[int]]]:
    """Of samples in the order of their rows: the tokens that each shares with others, and the rows of each group.

    Who begins with the same page has all whole pages of a prompt in common, which nobody writes to. Not all samples of
    a request do: some were prefilled again, by themselves or with a prompt that had been dropped.
    """
    same: dict[int, list[int]] = {}
    for row, run in enumerate(rows):
        if run.whole_pages * PAGE_SIZE >= SHARED_LEAST:
            same.setdefault(run.pages[0], []).append(row)
    starts, groups = [0] * len(rows), []
    for alike in same.values():
        if len(alike) >= LEAST_MEMBERS:
            parts = -(-len(alike) // MEMBERS)
            groups += [alike[part::parts] for part in range(parts)]
            for row in alike:
                starts[row] = rows[row].whole_pages * PAGE_SIZE
    return starts, groups
