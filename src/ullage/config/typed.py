"""Types the keys of a config: a few harmless coercions first, then pydantic, with its errors in words."""

import difflib
import os
import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError

from ullage.config.keys import describe, describe_field, fields_by_path, section_of
from ullage.config.paths import PARTS, PATHS
from ullage.config.problems import Problem
from ullage.config.tree import Config, Section
from ullage.config.yaml_reader import resolve_plain

_HOME = {*PATHS, *PARTS, "trainer.default_local_dir"}
"""Keys in which a leading ~ is the home folder, so that no reader has to think of it."""


def typed(leaves: Mapping[str, Any]) -> tuple[Config, list[Problem]]:
    """A Config from values by key path, and what is wrong with them; a wrong key has its default in that Config."""
    coerced = {path: _coerce_key(path, value) for path, value in leaves.items()}
    try:
        return Config.model_validate(_nested(coerced)), []
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
    problems: dict[str, Problem] = {}
    for detail in details:
        path, inside = _split_location(detail["loc"])
        at = None if detail["type"] == "missing" else detail["input"]
        problem = _problem(path, inside, at, leaves[path])
        problems.setdefault(problem.path, problem)
        coerced.pop(path, None)
    return Config.model_validate(_nested(coerced)), list(problems.values())


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *sections, name = path.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return tree


# --- coercions ---


def _coerce_key(path: str, value: object) -> object:
    coerced = coerce(fields_by_path()[path].annotation, value)
    if path not in _HOME:
        return coerced
    if isinstance(coerced, list):
        return [os.path.expanduser(item) if isinstance(item, str) else item for item in coerced]
    return os.path.expanduser(coerced) if isinstance(coerced, str) else coerced


def coerce(annotation: object, value: object) -> object:
    """The value in the form the type wants, where that loses nothing; otherwise the value as it is."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return coerce(arguments[0], value)
    if origin in (Union, types.UnionType):
        changed = (coerce(argument, value) for argument in arguments)
        return next((candidate for candidate in changed if candidate is not value), value)
    if origin is list:
        items = [value] if isinstance(value, str) else value
        return [coerce(arguments[0], item) for item in items] if isinstance(items, list) else value
    if origin is tuple and isinstance(value, list):
        return tuple(coerce(arguments[0], item) for item in value)
    section = section_of(annotation)
    if section and isinstance(value, dict):
        return _coerce_section(section, value)
    return _coerce_number(annotation, value)


def _coerce_number(annotation: object, value: object) -> object:
    if annotation not in (int, float):
        return value
    number = resolve_plain(value.strip()) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        return value
    if annotation is int:
        return int(number) if isinstance(number, int) or number.is_integer() else value
    try:
        return float(number)
    except OverflowError:  # an integer beyond the range of a float
        return value


def _coerce_section(section: type[Section], values: dict[Any, Any]) -> dict[Any, Any]:
    """A section inside a value: a reward function, or one that may be null."""
    fields = section.model_fields
    coerced = {
        name: coerce(fields[name].annotation, value) if name in fields else value for name, value in values.items()
    }
    path = coerced.get("path")
    return {**coerced, "path": os.path.expanduser(path)} if isinstance(path, str) else coerced


# --- errors in words ---


def _split_location(location: tuple[int | str, ...]) -> tuple[str, tuple[int | str, ...]]:
    """The key an error is about, and where inside its value."""
    for length in range(len(location), 0, -1):
        path = ".".join(str(part) for part in location[:length])
        if path in fields_by_path():
            return path, location[length:]
    raise AssertionError(f"an error outside every key: {location}")


def _problem(path: str, inside: tuple[int | str, ...], at: object, value: object) -> Problem:
    field = fields_by_path()[path]
    section = next(filter(None, map(section_of, get_args(field.annotation))), None)
    match inside:
        case (int(index), str(name), *_) if section:
            return _inner_problem(section, f"{path}[{index}].{name}", name, at)
        case (str(name), *_) if section:
            return _inner_problem(section, f"{path}.{name}", name, at)
        case (int(index), *_) if get_origin(field.annotation) is list:
            return Problem(f"{path}[{index}]", at, "must be " + describe(get_args(field.annotation)[0]))
        case (str(name),) if get_origin(field.annotation) is dict:
            return Problem(f"{path}.{name}", at, "must be " + describe(get_args(field.annotation)[1]))
    wants = describe_field(field)
    unquoted = wants in ("text", "text, or null") and isinstance(value, int | float)
    return Problem(path, value, f"must be {wants}" + ("; put it in quotes" if unquoted else ""))


def _inner_problem(section: type[Section], path: str, name: str, value: object) -> Problem:
    fields = section.model_fields
    if name in fields:
        return Problem(path, value, "must be " + describe_field(fields[name]))
    guess = difflib.get_close_matches(name, fields, n=1)
    return Problem(path, value, f"unknown key; did you mean {guess[0]}?" if guess else "unknown key")
