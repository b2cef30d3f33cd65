"""The only file that knows TensorBoard: scalars into an event file, without torch or tensorflow."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """`tensorboard --logdir runs` finds the event file below the run's logs."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def connect(folder: Path, project: str, info: Mapping[str, Any]) -> TensorBoard:
    """TensorBoard groups by folder, so the project and the run's description are not needed."""
    del project, info
    return TensorBoard(folder)
