"""`Trainer(config)` and `main(config)`: what `ullage train` does, called from Python."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from ullage.base.errors import ConfigError, PeerLostError, UllageError, UsageError
from ullage.compat.given import Given, Settings, read
from ullage.compat.session import Session, adopt, copy_whole, make_directory, verified
from ullage.config.check import require_runnable
from ullage.run.launch import discard_if_untrained, launch, newest_checkpoint
from ullage.telemetry.run_directory import RunDirectory


class Trainer:
    """One run. Its directory is made by the first call that needs it, and belongs to this process until `close`, the
    end of a `with` block, or the end of the program. With several ranks, `train` starts them as the command does."""

    def __init__(self, config: Given) -> None:
        self._loaded = read(config)
        require_runnable(self._loaded.config)
        self.config = Settings(self._loaded.config)
        self._directory: RunDirectory | None = None
        self._session: Session | None = None
        self._is_closed = False

    @property
    def run_directory(self) -> Path:
        """Where the run writes: metrics, samples, checkpoints, the trained model in `final/`."""
        return self._opened_directory().path

    def train(self) -> None:
        """Train to the last step, from where the run is; leaves the trained model in `final/`. Raises UllageError."""
        self._require_open()
        try:
            if self._num_ranks > 1:
                launch(self._opened_directory())
            else:
                self._opened_session().train()
        except (UllageError, KeyboardInterrupt) as error:
            self._discard_unless_told(error)
            raise

    def evaluate(self) -> dict[str, float]:
        """Scores of the weights as they are on `data.val_files`: `eval/<source>/<score>`."""
        self._require_open()
        if self._num_ranks > 1:
            raise ConfigError(
                f"evaluate() runs on one rank, trainer.n_gpus_per_node = {self._num_ranks}",
                f"use the command: ullage eval {self.run_directory}",
            )
        loop = self._opened_session().loop
        if loop.evaluator is None:
            raise ConfigError("no held-out data", "set data.val_files")
        return loop.evaluator.evaluate(loop.keeper.step).metrics

    def save_checkpoint(self, path: str | Path | None = None) -> None:
        """Write a checkpoint of everything: into the run's own folder, and a copy to `path` where one is given."""
        self._require_open()
        directory = self._opened_directory()
        if self._num_ranks > 1:
            folder, _ = newest_checkpoint(directory)
            if folder is None:
                raise ConfigError("the ranks have written no checkpoint yet", "train first, or set trainer.save_freq")
        else:
            keeper = self._opened_session().loop.keeper
            keeper.save()
            folder = directory.checkpoint_of(keeper.step)
        if path is not None:
            copy_whole(folder, Path(path).expanduser())

    def load_checkpoint(self, path: str | Path) -> None:
        """Continue from a checkpoint of a run with the same data and model: weights, optimizer, place in the data."""
        self._require_open()
        folder = verified(path)
        directory = self._opened_directory()
        self._close_session()
        adopt(folder, directory.checkpoints)
        if self._num_ranks == 1:
            self._opened_session()

    def close(self) -> None:
        """End the processes that the run started, and give its directory back."""
        self._is_closed = True
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _num_ranks(self) -> int:
        return self._loaded.config.trainer.n_gpus_per_node

    def _opened_directory(self) -> RunDirectory:
        if self._directory is None:
            self._directory = make_directory(self._loaded)
            weakref.finalize(self, self._directory.close)
        return self._directory

    def _opened_session(self) -> Session:
        if self._session is None:
            directory = self._opened_directory()
            try:
                self._session = Session(directory)
            except UllageError as error:
                self._discard_unless_told(error)
                raise
            weakref.finalize(self, self._session.close)
            self._opened(self._session)
        return self._session

    def _opened(self, session: Session) -> None:
        """Called when the models are there."""

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError("this trainer is closed", "make a new one; load_checkpoint continues where another ended")

    def _release(self) -> None:
        self._close_session()
        if self._directory is not None:
            self._directory.close()

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _discard_unless_told(self, error: BaseException) -> None:
        """A run that its input ends before its first step leaves nothing behind, unless its logs are the remedy."""
        if getattr(error, "code", None) not in (UllageError.code, PeerLostError.code) and self._directory is not None:
            directory = self._directory
            if not directory.metrics.exists() and not any(directory.checkpoints.glob("step_*")):
                self._release()
                discard_if_untrained(directory)
                self._directory = None


def main(config: Given) -> int:
    """Load the config, check it, train; 0 when the run has finished. Whatever ends it earlier is raised: an
    UllageError has the command's exit code as its `code`."""
    with Trainer(config) as trainer:
        trainer.train()
    return 0
