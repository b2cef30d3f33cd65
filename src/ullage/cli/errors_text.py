"""How a failure is told: one line of cause and one of remedy on stderr, or one JSON object on stdout."""

import json
import sys
import traceback
from typing import TextIO

from ullage.base.errors import UllageError


def report(error: UllageError, *, as_json: bool) -> int:
    """Tell the user what went wrong and what to do; returns the exit code."""
    if as_json:
        print(json.dumps({"code": error.code, "message": error.cause, "hint": error.remedy}))
    else:
        _say(f"ullage: error: {error.cause}")
        if error.remedy:
            _say(f"  fix: {error.remedy}")
    return error.code


def report_bug(error: Exception, *, as_json: bool) -> int:
    """An exception nobody foresaw is ours to fix."""
    message = f"internal error: {type(error).__name__}: {error}"
    if as_json:
        print(json.dumps({"code": 1, "message": message, "hint": "run again with --debug"}))
    else:
        _say(f"ullage: {message}; run again with --debug for the traceback")
    return 1


def show_traceback() -> None:
    """Where the error being handled came from, for `--debug`."""
    _say(traceback.format_exc().rstrip())


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(shown(text, sys.stderr), file=sys.stderr)


def shown(text: str, stream: TextIO) -> str:
    """Text as a stream can show it, whatever names are in it."""
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    from ullage.telemetry.view import encodable, printable  # loads more than most commands need

    return encodable(printable(text), stream)
