"""The tree read as a list: every key with its type in words, default and doc line, and the nearest key to a typo."""

import ast
import difflib
import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from ullage.config import tree
from ullage.config.problems import shorten
from ullage.config.tree import Config, Section


@dataclass(frozen=True)
class KeyInfo:
    """One key as the documentation shows it."""

    path: str
    type: str
    default: Any
    doc: str


def section_of(annotation: object) -> type[Section] | None:
    """The section class a field holds, if it holds one."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def walk_fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, type[Section], FieldInfo]]:
    """Every leaf field below `section`: its path, the class it is written in, and its field."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield prefix + name, section, field
        else:
            yield from walk_fields(inner, f"{prefix}{name}.")


@cache
def fields_by_path() -> dict[str, FieldInfo]:
    """The field of every leaf key."""
    return {path: field for path, _, field in walk_fields()}


@cache
def sections_by_path() -> dict[str, type[Section]]:
    """The class of every section, the whole tree under the empty path."""
    found: dict[str, type[Section]] = {"": Config}
    for path, owner, _ in walk_fields():
        found[path.rpartition(".")[0]] = owner
    # A section that holds only sections owns no leaf of its own.
    found["actor_rollout_ref"] = tree.ActorRolloutRef
    return found


def key_listing() -> list[KeyInfo]:
    """Every key that can be set, in the order of the file."""
    return [
        KeyInfo(
            path, describe_field(field), field.get_default(call_default_factory=True), _docs(owner).get(_last(path), "")
        )
        for path, owner, field in walk_fields()
        if path != "later"  # the loader's own
    ]


@cache
def _docs(section: type[Section]) -> dict[str, str]:
    """The string under each field. Read from the source here, on demand, because pydantic would do so at import."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef), f"not a class: {section}"
    parent = section.__base__
    assert parent is not None, "every section is a Section"
    docs = {} if parent is Section else dict(_docs(parent))
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[statement.target.id] = " ".join(text.split())
    return docs


def _last(path: str) -> str:
    return path.rpartition(".")[2]


# --- types in words ---


def describe_field(field: FieldInfo) -> str:
    """What a field accepts, in words: "a whole number above 0, or 'auto'"; its own, where its type says too little."""
    if field.description:
        return field.description
    if field.metadata:
        return _describe_number(field.annotation, field.metadata)
    return describe(field.annotation)


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "any value",
}


def describe(annotation: object) -> str:
    """What a type accepts, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin is Annotated:
        return _describe_number(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return ", or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        values = ", ".join(shorten(value) for value in arguments)
        return f"one of {values}" if len(arguments) > 1 else values
    if origin is tuple:
        return f"a list of {len(arguments)} items, each {describe(arguments[0])}"
    if origin is list:
        return f"a list, each item {describe(arguments[0])}"
    return "a mapping of keys to values"


def _describe_number(annotation: object, constraints: Iterable[object]) -> str:
    limits = []
    for constraint in constraints:
        match constraint:
            case Gt(gt=limit):
                limits.append(f"above {limit}")
            case Ge(ge=limit):
                limits.append(f"at least {limit}")
            case Lt(lt=limit):
                limits.append(f"below {limit}")
            case Le(le=limit):
                limits.append(f"at most {limit}")
    return " ".join([describe(annotation), " and ".join(limits)]).strip()


# --- nearest match ---


def nearest(path: str, more: tuple[str, ...] = ()) -> str | None:
    """The known key that a mistyped path most likely means."""
    known = [*fields_by_path(), *(name for name in sections_by_path() if name), *more]
    last = _last(path)
    same_name = [candidate for candidate in known if _last(candidate) == last]
    if same_name:  # the right name in the wrong section
        return max(same_name, key=lambda candidate: _likeness(path, candidate))
    if found := difflib.get_close_matches(path, known, n=1, cutoff=0.85):
        return found[0]
    names = {_last(candidate) for candidate in known}
    if found := difflib.get_close_matches(last, names, n=1, cutoff=0.75):
        same_name = [candidate for candidate in known if _last(candidate) == found[0]]
        return max(same_name, key=lambda candidate: _likeness(path, candidate))
    return None


def _likeness(path: str, candidate: str) -> float:
    """Of a path and the end of another, as many sections long: few write out the whole path."""
    end = ".".join(candidate.split(".")[-path.count(".") - 1 :])
    return difflib.SequenceMatcher(None, path, end).ratio()
