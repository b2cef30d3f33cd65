"""One rank of the tests of the communicator: does what its argument names and prints what it saw as JSON."""

import json
import os
import signal
import sys
import time

import torch

from ullage.base.errors import DataError, UllageError
from ullage.engine.parallel import Ranks, join, leave


def talk(ranks):
    tensor = torch.full((3,), float(ranks.rank + 1))
    ranks.sum_tensor_(tensor)
    return {
        "rank": ranks.rank,
        "size": ranks.size,
        "sum": ranks.sum([1.5, ranks.rank]),
        "max": ranks.max([-3.0, -float(ranks.rank)]),
        "tensor": tensor.tolist(),
        "gather": ranks.gather({"text": "ä日🙂" * (1 + 50 * ranks.rank), "rank": ranks.rank, "none": None}),
        "empty": ranks.gather([]),
        "agreed": ranks.raise_together(None),
    }


def fail(ranks):
    ranks.raise_together(DataError("line 17 is broken", "fix it") if ranks.rank == 1 else None)


def die(ranks):
    ranks.sum([1.0])
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    ranks.sum([1.0])


def main():
    ranks = join(torch.device("cpu"))
    assert isinstance(ranks, Ranks)
    try:
        print(json.dumps(globals()[sys.argv[1]](ranks)), flush=True)
    except UllageError as error:
        print(json.dumps([type(error).__name__, error.cause, error.remedy]), flush=True)
        os._exit(error.code)
    leave()


if __name__ == "__main__":
    main()
