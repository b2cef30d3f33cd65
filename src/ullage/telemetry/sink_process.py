"""The process behind a sink, `python -m ullage.telemetry.sink_process NAME`: JSON lines in, to a logger out."""

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """What `ullage/telemetry/<name>_sink.py` offers as `connect(folder, project, info)`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Results of one step."""

    def close(self) -> None:
        """Write out everything."""


def main(name: str) -> None:
    """Serve one run until the pipe closes, which it also does when the training is killed."""
    opening = json.loads(sys.stdin.readline())
    logger = _connect(name, opening)
    try:
        for line in sys.stdin:
            message = json.loads(line)
            # null stands for a number that is not finite; loggers take neither well
            metrics = {key: value for key, value in message["metrics"].items() if value is not None}
            logger.log(message["step"], metrics)
    finally:
        logger.close()


def _connect(name: str, opening: Mapping[str, Any]) -> Logger:
    module = import_module(f"ullage.telemetry.{name}_sink")
    logger: Logger = module.connect(Path(opening["folder"]), opening["project"], opening["info"])
    return logger


if __name__ == "__main__":
    main(sys.argv[1])
