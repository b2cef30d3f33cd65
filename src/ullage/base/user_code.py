"""What went wrong in code of the user's, in one line that is safe to print."""

import traceback

MAX_TEXT = 300
"""Characters of an error text that are kept: model text may be in it."""


def raised(error: BaseException, file: str | None) -> str:
    """`raised ValueError: text at my_reward.py:7`, the line being the deepest one in `file` where there is one."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 -- an exception class of the user's whose text cannot be made
        text = ""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == file]
    place = f" at {inside[-1].filename.rsplit('/', 1)[-1]}:{inside[-1].lineno}" if inside else ""
    return f"raised {type(error).__name__}{': ' if text else ''}{printable(text)}{place}"


def printable(text: str) -> str:
    """One line without control characters, of bounded length: it goes to terminals and log files."""
    line = "".join(character if character.isprintable() else " " for character in text[: MAX_TEXT + 1])
    return line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + "…"
