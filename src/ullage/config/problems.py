"""What is wrong with a config, and how that is said: one line per problem, all of them at once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ullage.base.errors import ConfigError

_SECRET = re.compile(r"(api|access|auth|hf|hub|wandb|bearer)_?(key|token)$|secret|password|passwd|credential", re.I)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the key, its value, and the rule it breaks."""

    path: str
    value: Any
    rule: str
    also: tuple[str, ...] = ()
    """Other keys the rule reads: where one of them is wrong already, this problem would only repeat it."""

    def __str__(self) -> str:
        value = "***" if looks_secret(self.path) else shorten(self.value)
        return f"{self.path} = {value}: {self.rule}" if self.path else self.rule


def looks_secret(path: str) -> bool:
    """Whether the last name of a path is one that usually holds a password or token."""
    return _SECRET.search(path.rpartition(".")[2]) is not None


def shorten(value: object) -> str:
    """The value as a config shows it, on one line and not too long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        text = "a very long number"
    return text if len(text) <= 60 else text[:57] + "..."


def raise_if_any(problems: Sequence[Problem], source: str, remedy: str) -> None:
    """Raise one ConfigError that lists every problem."""
    unique = list(dict.fromkeys(str(problem) for problem in problems))
    if unique:
        count = "1 problem" if len(unique) == 1 else f"{len(unique)} problems"
        raise ConfigError("\n  ".join([f"{count} in {source}", *unique]), remedy)
