"""Overrides from the command line: `a.b=c` items and `--a.b c` flags, with hydra's spelling of values."""

import re
from collections.abc import Sequence
from typing import Any

from ullage.base.errors import ConfigError, UsageError
from ullage.config.yaml_reader import read_text, resolve_plain

_ITEM = re.compile(r"\+{0,2}(?P<path>[A-Za-z_]\w*(\.\w+)*)=(?P<value>.*)", re.DOTALL)
_FLAG = re.compile(r"--(?P<path>[A-Za-z_]\w*(\.\w+)+)(=(?P<value>.*))?", re.DOTALL)
_REMEDY = "write key=value, for example trainer.save_freq=5"


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The `a.b=c` items of a command line, and what is left. Only a flag with a dot in it is an override."""
    overrides: list[str] = []
    rest: list[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return overrides, [*rest, word, *waiting]
        flag = _FLAG.fullmatch(word)
        if flag is None:
            (overrides if _ITEM.fullmatch(word) else rest).append(word)
        elif flag["value"] is not None:
            overrides.append(f"{flag['path']}={flag['value']}")
        elif waiting and not waiting[0].startswith("--"):
            overrides.append(f"{flag['path']}={waiting.pop(0)}")
        else:
            raise UsageError(f"{word} has no value", f"give one: {word} VALUE")
    return overrides, rest


def parse_override(item: str) -> tuple[list[str], Any]:
    """The key path and the value of one `a.b=c`; a leading + or ++, which hydra needs to add a key, changes nothing."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ConfigError(f"not an override: {item!r}", _REMEDY)
    return match["path"].split("."), parse_value(match["value"], match["path"])


def parse_value(text: str, path: str) -> object:
    """A value as YAML reads it: a list or mapping in brackets, quoted text, or one plain scalar."""
    stripped = text.strip()
    if not stripped:
        return ""
    if stripped[0] in "[{" or (stripped[0] in "'\"" and stripped[-1] == stripped[0] and len(stripped) > 1):
        return read_text(stripped, f"override {path}")
    return resolve_plain(stripped)


def apply_override(mapping: dict[str, Any], item: str) -> None:
    """Set one key of a nested mapping, making the sections on the way."""
    names, value = parse_override(item)
    for depth, name in enumerate(names[:-1]):
        inner = mapping.get(name)
        if inner is None:
            inner = mapping[name] = {}
        if not isinstance(inner, dict):
            here = ".".join(names[: depth + 1])
            raise ConfigError(f"override {item}: {here} is {inner!r}, not a section of keys", _REMEDY)
        mapping = inner
    mapping[names[-1]] = value
