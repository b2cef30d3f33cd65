"""Who this process is among others: alone, announced by a launcher, and met."""

import os
import socket
import subprocess
import sys

import pytest

from ullage import distributed
from ullage.base.errors import ConfigError

MEET = """
import sys
from ullage.distributed import get_rank, get_world_size, is_main_process, setup_distributed_environment
setup_distributed_environment()
setup_distributed_environment()
import torch, torch.distributed as dist
number = torch.tensor([get_rank() + 1.0])
dist.all_reduce(number)
print(get_rank(), get_world_size(), is_main_process(), number.item())
dist.destroy_process_group()
"""


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process(alone):
    distributed.setup_distributed_environment()
    assert (distributed.get_world_size(), distributed.get_rank(), distributed.is_main_process()) == (1, 0, True)


def test_what_a_launcher_announces(alone):
    alone.setenv("WORLD_SIZE", "4")
    alone.setenv("RANK", "3")
    assert (distributed.get_world_size(), distributed.get_rank(), distributed.is_main_process()) == (4, 3, False)
    with pytest.raises(ConfigError, match=r"cannot join 4 processes: .*MASTER_ADDR"):
        distributed.setup_distributed_environment()
    alone.setenv("RANK", "x")
    with pytest.raises(ConfigError, match="RANK=x in the environment is not a number"):
        distributed.get_rank()


@pytest.mark.slow
def test_two_processes_meet(alone):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEET], env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    assert [process.communicate(timeout=60)[0] for process in started] == ["0 2 True 3.0\n", "1 2 False 3.0\n"]
