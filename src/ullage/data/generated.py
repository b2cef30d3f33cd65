"""Rows that are made instead of read: `reasoning_gym:<task>`, with options as in `reasoning_gym:leg_counting:size=100`.

The same name gives the same rows in every process, so held-out data needs another seed: `reasoning_gym:sudoku:seed=1`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ullage.base.errors import DataError
from ullage.base.seeds import derive

REASONING_GYM = "reasoning_gym"
NUM_ROWS = 500
SYNTAX = f"write {REASONING_GYM}:<task> or {REASONING_GYM}:<task>:size={NUM_ROWS}:seed=0:<option>=<value>"


def is_generated(file: str) -> bool:
    return file.partition(":")[0] == REASONING_GYM


def generated_rows(file: str) -> Iterator[dict[str, Any]]:
    """The rows that `file` names, made as they are asked for."""
    task, options = parse(file)
    command = [sys.executable, "-P", str(Path(__file__).with_name("reasoning_gym_process.py")), task]
    process = subprocess.Popen(
        [*command, json.dumps(options)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        text=True,
        encoding="utf-8",
    )
    assert process.stdout is not None, "a pipe was asked for"
    made = 0
    try:
        for line in process.stdout:
            reply = json.loads(line)
            if "problem" in reply:
                cause, remedy = reply["problem"]
                raise DataError(f"{file}: {cause}", remedy)
            made += 1
            yield reply["row"]
        if made < options["size"]:
            raise DataError(
                f"{file}: the process that makes the rows ended after {made} of them, with code {process.wait()}",
                f"look what happens in a Python shell: reasoning_gym.create_dataset('{task}', ...)",
            )
    finally:  # also where the caller wants no more rows
        process.kill()
        process.stdout.close()
        process.wait()


def parse(file: str) -> tuple[str, dict[str, Any]]:
    """Task and options of `reasoning_gym:<task>:<option>=<value>...`; values are JSON, anything else is text.

    The seed becomes another: a task makes row i from its seed + i, so that neighbours would share all rows but one.
    """
    task, *given = file.split(":")[1:] or [""]
    if not task:
        raise DataError(f"{file}: names no task", SYNTAX)
    options: dict[str, Any] = {"size": NUM_ROWS, "seed": 0}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals:
            raise DataError(f"{file}: '{item}' is not an option", SYNTAX)
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    for name, smallest in (("size", 1), ("seed", 0)):
        if type(options[name]) is not int or options[name] < smallest:
            raise DataError(f"{file}: {name} is {options[name]!r}", f"give a whole number from {smallest} on")
    options["seed"] = derive(options["seed"], REASONING_GYM, task) >> 32  # 31 bits: numpy takes no more than 32
    return task, options
