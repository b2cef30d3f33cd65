"""`ullage train`: from a config file and overrides to a trained model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage.config.tree import Config
    from ullage.telemetry.run_directory import RunDirectory

HELP = "train from a config file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", type=Path, help="YAML file; keys can be overridden: a.b=c or --a.b c")
    parser.add_argument("--dry-run", action="store_true", help="check the config, show what it resolves to, and stop")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from ullage.config.check import require_runnable
    from ullage.config.load import load_config, resolved_yaml

    loaded = load_config(arguments.config, overrides)
    for notice in loaded.notices:
        print(f"config: {notice}", file=sys.stderr)
    require_runnable(loaded.config)
    if arguments.dry_run:
        print(resolved_yaml(loaded.config), end="")
        return 0
    path, code = start(loaded.config, given=loaded.given)
    if arguments.json:
        print(json.dumps({"run": str(path), "code": code}))
    return code


def start(
    config: Config,
    given: Mapping[str, Any],
    *,
    directory: RunDirectory | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> tuple[Path, int]:
    """Make the run directory and train in it; a run that its input ends before its first step leaves nothing behind.

    `prepare` may put files of its own into the new directory.
    """
    import yaml

    from ullage.base.errors import PeerLostError, UllageError
    from ullage.config.load import resolved_yaml
    from ullage.config.paths import anchored
    from ullage.run.launch import discard_if_untrained, launch
    from ullage.telemetry.run_directory import RunDirectory, write_atomically

    if directory is None:
        directory = RunDirectory(Path(config.trainer.default_local_dir).expanduser(), config.trainer.experiment_name)
    directory.create()
    try:
        prepare()
        write_atomically(directory.config, yaml.safe_dump(given, sort_keys=False))
        write_atomically(directory.resolved, resolved_yaml(anchored(config, Path.cwd())))
        code = launch(directory)
    except (UllageError, KeyboardInterrupt) as error:
        if getattr(error, "code", None) not in (UllageError.code, PeerLostError.code):  # those two send to the logs
            discard_if_untrained(directory)
        raise
    finally:
        directory.close()
    print(f"trained model: {directory.final}", file=sys.stderr)
    return directory.path, code
