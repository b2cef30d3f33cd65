"""Values of a data set as plain JSON types."""

import base64
import datetime
import decimal
import math
import uuid
from typing import Any

from ullage.base.errors import DataError


def plain(value: Any, where: str) -> Any:  # noqa: ANN401 -- any value in, any JSON value out
    """The value in plain JSON types, because rows travel to the reward processes as JSON.

    NaN and infinities, which JSON does not have, become null; times become ISO text, durations seconds,
    bytes text (base64 where they are not UTF-8), decimals floats.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_text(str(key), where): plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where) for item in value]
    return _plain_special(value, where)


def _plain_special(value: Any, where: str) -> Any:  # noqa: ANN401
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal):
        return plain(float(value), where)
    if isinstance(value, datetime.date | datetime.time):  # datetime is a date
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, uuid.UUID):
        return str(value)
    if hasattr(value, "tolist"):  # numpy arrays and numbers
        return plain(value.tolist(), where)
    raise DataError(f"{where}: cannot use a value of type {type(value).__name__}", "remove the column or convert it")


def _text(value: str, where: str) -> str:
    """Text that can be encoded: no tokenizer accepts half of a surrogate pair, which JSON escapes can spell."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: half of a surrogate pair at character {error.start}: {excerpt(value, error.start)}",
            "a character was cut in two when the file was written; correct or delete this row",
        ) from None
    return value


def one_line(error: Exception) -> str:
    """What an error of another library says, without its line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def excerpt(text: str, position: int) -> str:
    """The text around a position, quoted, for an error message."""
    return repr(text[max(0, position - 20) : position + 20].strip())
