"""Reads YAML into plain values: YAML 1.2 scalars, no duplicate keys, no tags, nothing executed.

PyYAML only parses here. Its own construction of values follows YAML 1.1, where `1e-6` is text, `no` is false and a tag
may name a Python object.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ullage.base.errors import ConfigError

if TYPE_CHECKING:
    import yaml  # loaded by those that read or write it: most verbs do not

MAX_BYTES = 1_000_000
MAX_NODES = 20_000
"""Nodes after aliases are followed, so that a small file cannot unfold into a large one."""
MAX_DEPTH = 64

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]{1,4000}|0o[0-7]{1,4000}|0x[0-9a-fA-F]{1,4000}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_PLAIN_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


@cache
def _parser() -> type[yaml.SafeLoader]:
    import yaml

    class Parser(yaml.SafeLoader):
        """Parses without guessing types, so that the only tags left are those the file itself wrote."""

        yaml_implicit_resolvers = {}  # noqa: RUF012 -- PyYAML's own class attribute

    return Parser


def read_file(path: Path) -> object:
    """The value of a YAML file; None when it is empty."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the config {path}: {reason}", "check the path") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_BYTES:,} bytes", "a config is a few hundred lines; is this one?")
    return read_text(text, str(path))


def read_text(text: str, source: str) -> object:
    """The value of YAML text; `source` names it in messages."""
    import yaml

    try:
        node = yaml.compose(text, Loader=_parser())
        return None if node is None else _Builder(source).build(node, 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {error.problem or error.context}", _REMEDY) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not valid YAML: {_first_line(error)}", _REMEDY) from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply", f"a config has at most {MAX_DEPTH} levels") from None


_REMEDY = "correct that line; a value with special characters goes in quotes"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def resolve_plain(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar, as the core schema of YAML 1.2 reads it."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", ""))
    return text


class _Builder:
    """Turns parsed nodes into values, counting them as it goes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.nodes = 0

    def build(self, node: yaml.Node, depth: int) -> object:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self.refuse(node, f"unfolds to more than {MAX_NODES:,} values", "remove the repeated aliases (*name)")
        if depth > MAX_DEPTH:
            self.refuse(node, f"nested more than {MAX_DEPTH} levels deep", "an alias may not contain itself")
        if node.tag not in _PLAIN_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.refuse(node, f"the tag {tag} is not allowed", "a config holds plain values; nothing in it is executed")
        import yaml

        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, depth + 1) for item in node.value]
        assert isinstance(node, yaml.ScalarNode), f"a fourth kind of node: {node}"
        return resolve_plain(node.value) if node.style is None else node.value

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            key = self.build(key_node, depth + 1)
            if not isinstance(key, str):
                self.refuse(key_node, f"the key {key!r} is not text", "put it in quotes")
            if key in lines:
                self.refuse(key_node, f"duplicate key '{key}', first given on line {lines[key]}", "keep one of the two")
            lines[key] = key_node.start_mark.line + 1
            values[key] = self.build(value_node, depth + 1)
        return values

    def refuse(self, node: yaml.Node, what: str, remedy: str) -> NoReturn:
        raise ConfigError(f"{self.source}:{node.start_mark.line + 1}: {what}", remedy)


@cache
def _writer() -> type[yaml.SafeDumper]:
    import yaml

    class Writer(yaml.SafeDumper):
        """Writes YAML that `read_text` reads back unchanged."""

        def ignore_aliases(self, data: object) -> bool:
            """A value used twice is written twice."""
            return True

    Writer.add_representer(str, _represent_text)
    return Writer


def _represent_text(writer: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if resolve_plain(text) == text else "'"
    if not text.isprintable():  # only double quotes keep every kind of line break and control character
        style = '"'
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def write_text(value: object) -> str:
    """The value as YAML, keys in the order given."""
    import yaml

    text = yaml.dump(value, Dumper=_writer(), sort_keys=False, allow_unicode=True, width=120)
    assert isinstance(text, str), "yaml.dump without a stream returns text"
    return text
