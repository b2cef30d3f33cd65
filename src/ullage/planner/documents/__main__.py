"""`python -m ullage.planner.documents`: write the generated documents and templates, or say which are out of date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ullage.planner.documents import documents
from ullage.planner.documents.page import COMMAND
from ullage.telemetry.run_directory import write_atomically


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ullage.planner.documents", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write what has changed")
    action.add_argument("--check", action="store_true", help="write nothing; exit with 1 where something would change")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: here)")
    arguments = parser.parse_args(words)
    changed = outdated(arguments.root)
    for name, text in changed.items() if arguments.write else ():
        (arguments.root / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.root / name, text)
    for name in changed:
        sys.stderr.write(f"{'wrote' if arguments.write else 'out of date:'} {name}\n")
    if changed and arguments.check:
        sys.stderr.write(f"write them with: {COMMAND}\n")
    return 1 if changed and arguments.check else 0


def outdated(root: Path) -> dict[str, str]:
    """Files whose text is another than the planner would write, with the text that they should have."""
    return {name: text for name, text in documents().items() if _read(root / name) != text}


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
