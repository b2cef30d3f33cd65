"""Two real processes over gloo: sums, gathered values, shared errors, a killed peer."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ullage.base.communicator import Solo
from ullage.engine.parallel import join

SCRIPT = Path(__file__).parent / "rank_script.py"


def run_ranks(what, count=2):
    """Exit code and printed value of every rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), what],
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    results = []
    for process in processes:
        out, err = process.communicate(timeout=90)
        assert out or process.returncode < 0, err
        results.append((process.returncode, json.loads(out) if out else None))
    return results


def test_ranks_agree():
    for rank, (code, seen) in enumerate(run_ranks("talk")):
        assert code == 0
        assert seen == {
            "rank": rank,
            "size": 2,
            "sum": [3.0, 1.0],
            "max": [-3.0, 0.0],
            "tensor": [3.0, 3.0, 3.0],
            "gather": [
                {"text": "ä日🙂", "rank": 0, "none": None},
                {"text": "ä日🙂" * 51, "rank": 1, "none": None},
            ],
            "empty": [[], []],
            "agreed": None,
        }


def test_an_error_of_one_rank_is_raised_on_all():
    assert run_ranks("fail") == [(65, ["DataError", "rank 1: line 17 is broken", "fix it"])] * 2


def test_a_killed_peer_is_a_lost_peer():
    (code, (name, cause, _)), (killed, _) = run_ranks("die")
    assert killed == -9
    assert (code, name) == (80, "PeerLostError")
    assert cause.startswith("rank 0 lost a peer: ")


@pytest.mark.parametrize("size", [None, "1"])
def test_one_process_needs_no_group(monkeypatch, size):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert isinstance(join(torch.device("cpu")), Solo)
