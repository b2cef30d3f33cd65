"""Which of several processes this one is, and how to meet the others. A run needs none of this: it starts its own."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ullage.base.errors import ConfigError
from ullage.engine import parallel


def setup_distributed_environment() -> None:
    """Join the processes that a launcher such as torchrun has started; nothing to do where this one is alone."""
    if dist.is_initialized() or get_world_size() == 1:
        return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    try:
        parallel.join(device)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cannot join {get_world_size()} processes: {str(error).splitlines()[0]}",
            "start them with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each",
        ) from error


def get_world_size() -> int:
    """How many processes there are: those that have met, or those that the launcher has announced, or one."""
    return dist.get_world_size() if dist.is_initialized() else _announced("WORLD_SIZE", 1)


def get_rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else _announced("RANK", 0)


def is_main_process() -> bool:
    """Whether this process is the one that writes and prints."""
    return get_rank() == 0


def _announced(variable: str, alone: int) -> int:
    text = os.environ.get(variable, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{variable}={text} in the environment is not a number", "unset it, or start with torchrun")
    return int(text) if text else alone
