"""The only file that knows Weights & Biases. `WANDB_MODE=offline` needs no account and no network."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb


class WeightsAndBiases:
    """One wandb run per training run; a resumed run continues under the same id."""

    def __init__(self, folder: Path, project: str, info: Mapping[str, Any]) -> None:
        self._run = wandb.init(
            project=project,
            name=info["name"],
            id=f"{info['name']}-{info['created_at']:.0f}",
            resume="allow",
            dir=str(folder),
            config=dict(info),
            settings=wandb.Settings(console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def connect(folder: Path, project: str, info: Mapping[str, Any]) -> WeightsAndBiases:
    return WeightsAndBiases(folder, project, info)
