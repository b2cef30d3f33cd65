"""The process in which reward functions run: `python -m ullage.rewards.worker`, JSON lines in and out. Light to import.

The first line names the functions; the reply describes them or lists what is wrong. Every further line is a request;
the replies are one line per function, in order, up to the first that failed. The time limit is the pool's business.
"""

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from ullage.base.errors import ConfigError
from ullage.rewards.guard import fork_behind_guard
from ullage.rewards.results import UnusableResult, raised
from ullage.rewards.signatures import LoadedReward, load


def main() -> None:
    """Load, then score until the input ends."""
    fork_behind_guard()
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    # What user code reads or prints must not meet the protocol, nor the run's terminal.
    with open(os.devnull, "r+b") as nowhere:
        for descriptor in (0, 1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    _yield_memory()

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    rewards, message = _loaded(json.loads(requests.readline())["functions"])
    reply(message)
    for line in requests:
        for reward in rewards:
            # Decoded for each function, so that one that changes its arguments changes nothing for the next.
            message = _scored(reward, json.loads(line))
            reply(message)
            if "error" in message:
                break


def _yield_memory() -> None:
    """A reward that eats the machine's memory fails by itself, or is the first to be killed; the run is not."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (half if hard < 0 else min(half, hard), hard))
    with contextlib.suppress(OSError):  # Linux only, and some containers mount /proc read-only
        Path("/proc/self/oom_score_adj").write_text("1000")


def _loaded(functions: list[dict[str, Any]]) -> tuple[list[LoadedReward], dict[str, Any]]:
    sys.path.append(os.getcwd())  # last, so that no file beside the config can hide an installed module
    rewards, problems = [], []
    for function in functions:
        if function["path"] is not None:
            sys.path.append(str(Path(function["path"]).expanduser().resolve().parent))
        try:
            rewards.append(load(**function))
        except ConfigError as error:
            problems.append([error.cause, error.remedy])
    described = [{"label": r.label, "where": r.where, "description": r.description} for r in rewards]
    return rewards, {"problems": problems} if problems else {"rewards": described}


def _scored(reward: LoadedReward, request: dict[str, Any]) -> dict[str, Any]:
    try:
        result = reward.score(request)
    except UnusableResult as error:
        return {"error": f"{reward.where} {error}"}
    except BaseException as error:  # noqa: BLE001 -- user code: whatever it raises, SystemExit included, costs one sample
        return {"error": f"{reward.where} {raised(error, reward.file)}"}
    return result._asdict()


if __name__ == "__main__":
    main()
