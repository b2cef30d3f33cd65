"""Which columns of a row are prompt, target and source: TRL's, verl's and GSM8K's by name, others by a map."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ullage.base.errors import ConfigError, DataError
from ullage.data.readers import Row

# The first that a row has is used. Dotted names reach into nested columns.
PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")
# verl's place first; `answer` before `solution`, since maths data often has both and the answer is the short one.
TARGET_COLUMNS = ("reward_model.ground_truth", "answer", "solution", "ground_truth", "target")
SOURCE_COLUMNS = ("data_source",)
COMPLETION_COLUMNS = ("completion", "response")
ROLES_OF_COLUMNS = ("prompt", "target", "source", "completion")
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")

Given = str | list[dict[str, Any]]
"""A prompt as the data has it: text, or chat messages."""

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Fields:
    """What a row says."""

    prompt: Given
    target: Any
    source: str
    completion: str | None
    """The answer to learn, for supervised training; a finished conversation's last reply is one."""
    extra: dict[str, Any]
    """Every column but the prompt's: TRL's reward functions ask for them by name, the target's included."""


def check_map(columns: Mapping[str, str]) -> None:
    """Refuse a `data.columns` with a role that does not exist."""
    for role in columns:
        if role not in ROLES_OF_COLUMNS:
            near = difflib.get_close_matches(role, ROLES_OF_COLUMNS, n=1)
            hint = f"did you mean data.columns.{near[0]}?" if near else "other columns reach reward functions by name"
            raise ConfigError(f"data.columns.{role}: must be one of {', '.join(ROLES_OF_COLUMNS)}", hint)


def fields_of(row: Row, columns: Mapping[str, str], *, default_source: str) -> Fields:
    """The prompt, target, source and other columns of a row."""
    column, value = _find(row, "prompt", columns, PROMPT_COLUMNS)
    if column is None:
        raise _missing(row, "prompt", "/".join(PROMPT_COLUMNS))
    for media in MEDIA_COLUMNS:
        if row.values.get(media):
            raise DataError(
                f"{row.where}: column '{media}' is not empty", "only text prompts are supported: remove the column"
            )
    prompt = _prompt(value, f"{row.where}: column '{column}'")
    _, target = _find(row, "target", columns, TARGET_COLUMNS)
    completion = _completion(*_find(row, "completion", columns, COMPLETION_COLUMNS), row)
    if column == "messages" and isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        *prompt, reply = prompt  # a finished conversation, as for supervised training: its reply is the target
        target = reply["content"] if target is None else target
        completion = reply["content"] if completion is None else completion
        if not prompt:
            raise DataError(f"{row.where}: column 'messages' holds nothing but a reply", "put the question before it")
    _, source = _find(row, "source", columns, SOURCE_COLUMNS)
    extra = {name: item for name, item in row.values.items() if name != column}
    return Fields(prompt, target, default_source if source is None else str(source), completion, extra)


def _completion(column: str | None, value: Any, row: Row) -> str | None:  # noqa: ANN401 -- whatever the cell holds
    """Text, or TRL's list of one assistant message; a column that merely has a usual name may hold anything."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content")
    if value is None or isinstance(value, str):
        return value
    if column in COMPLETION_COLUMNS:
        return None
    raise DataError(
        f"{row.where}: column '{column}': a completion must be text, found {type(value).__name__}",
        "name another column with data.columns.completion=<column>",
    )


def _find(row: Row, role: str, columns: Mapping[str, str], known: tuple[str, ...]) -> tuple[str | None, Any]:
    """Name and value of the column that plays a role; a mapped one must exist, of the known ones the first is taken."""
    if role in columns:
        value = _lookup(row.values, columns[role])
        if value is _MISSING:
            raise _missing(row, role, columns[role])
        return columns[role], value
    found = [(name, value) for name in known if (value := _lookup(row.values, name)) is not _MISSING]
    # A null beside a filled column is what merging data sets of different columns leaves behind.
    return next((pair for pair in found if pair[1] is not None), found[0] if found else (None, None))


def _lookup(values: Any, path: str) -> Any:  # noqa: ANN401 -- JSON values
    """The value at a dotted path, `_MISSING` where there is none; a column whose own name has dots wins."""
    if not isinstance(values, dict):
        return _MISSING
    if path in values:
        return values[path]
    head, _, rest = path.partition(".")
    return _lookup(values.get(head, _MISSING), rest) if rest else _MISSING


def _missing(row: Row, role: str, wanted: str) -> DataError:
    found = list(row.values)
    near = difflib.get_close_matches(wanted, found, n=1, cutoff=0.5) or difflib.get_close_matches(role, found, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    listed = ", ".join(found[:20]) + (", ..." if len(found) > 20 else "") if found else "none"
    return DataError(
        f"{row.where}: no {role} column ({wanted}); columns found: {listed}{hint}",
        f"say which column it is: data.columns.{role}={near[0] if near else '<column>'}",
    )


def _prompt(value: Any, where: str) -> Given:  # noqa: ANN401 -- whatever the cell holds
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return [_message(message, f"{where}, message {number}") for number, message in enumerate(value, start=1)]
    found = "null" if value is None else "empty" if value in ("", []) else f"{type(value).__name__} {str(value)[:40]!r}"
    raise DataError(
        f"{where}: a prompt must be text or a list of messages, found {found}",
        "correct or delete this row, or name another column with data.columns.prompt=<column>",
    )


def _message(message: Any, where: str) -> dict[str, Any]:  # noqa: ANN401
    """A chat message. Columnar files give every message every key: the null ones are dropped again."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        found = f"keys {', '.join(message)}" if isinstance(message, dict) else f"{type(message).__name__}"
        raise DataError(f"{where}: not a chat message, found {found}", 'write {"role": "user", "content": "..."}')
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts_only = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
    if not (isinstance(content, str) or (parts and texts_only) or (content is None and message.get("tool_calls"))):
        raise DataError(
            f"{where}: content must be text, found {'null' if content is None else repr(str(content)[:40])}",
            'write {"role": "user", "content": "..."}; only text is supported',
        )
    return {key: item for key, item in message.items() if item is not None} | {"content": content}
