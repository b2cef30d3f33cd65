"""Makes the rows of a reasoning-gym task: run as a script, JSON lines out. Imports nothing of this package.

A process of its own, because some tasks draw from sets, so that their rows depend on the interpreter's hash seed, some
draw from the global random state, and some print.
"""

import dataclasses
import difflib
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any


class Unusable(Exception):  # noqa: N818 -- not a failure of the program: its two texts become the run's error
    """Cause and remedy."""


def make_rows(task: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a task, in plain JSON types; `options` are the task's own, with `size` and `seed` among them."""
    dataset = _dataset(task, options)
    random.seed(options["seed"])
    for index in range(options["size"]):
        try:
            entry = dataset[index]
        except Exception as error:  # a task's own code
            raise Unusable(f"cannot make row {index + 1}: {_described(error)}", "change the task's options") from error
        row = {
            "prompt": entry["question"],
            # Tasks with many right answers store none and score from the metadata.
            "answer": "" if entry["answer"] is None else entry["answer"],
            "data_source": task,
            "metadata": entry["metadata"],
        }
        plain: dict[str, Any] = json.loads(json.dumps(row))
        yield plain


def _dataset(task: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- reasoning-gym has no types
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a dependency's source, when it is first compiled
            from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        remedy = "install it: pip install 'ullage[reasoning-gym]'"
        raise Unusable(f"needs the package reasoning-gym: {error}", remedy) from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"it has: {', '.join(sorted(DATASETS))}"
        raise Unusable(f"reasoning-gym has no task called '{task}'", remedy)
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for name in options:
        if name not in known:
            raise Unusable(f"the task has no option '{name}'", f"it takes: {', '.join(known)}")
    try:
        return create_dataset(task, **options)
    except Exception as error:  # a task's own checks, mostly assertions
        raise Unusable(f"the task refuses its options: {_described(error)}", f"it takes: {', '.join(known)}") from error


def _described(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(task: str, options: str) -> None:
    """Write `{"row": ...}` lines; the last one is `{"problem": [cause, remedy]}` where something went wrong."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        # What a task prints must not meet the rows, nor the run's terminal.
        with open(os.devnull, "r+b") as nowhere:
            for descriptor in (0, 1, 2):
                os.dup2(nowhere.fileno(), descriptor)
        try:
            for row in make_rows(task, json.loads(options)):
                replies.write(json.dumps({"row": row}) + "\n")
        except Unusable as unusable:
            replies.write(json.dumps({"problem": unusable.args}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
