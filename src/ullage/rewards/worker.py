"""The process in which reward functions run: `python -m ullage.rewards.worker`, JSON lines in and out. Light to import.

The first line names the functions; the reply describes them or lists what is wrong. Every further line is a request to
some of them, by number; the replies are one line each, in order, up to the first that failed. The time limit is the
pool's business.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from ullage.base.errors import ConfigError
from ullage.base.guard import enter_worker
from ullage.base.user_code import raised
from ullage.rewards.results import UnusableResult
from ullage.rewards.signatures import LoadedReward, load


def main() -> None:
    """Load, then score until the input ends."""
    requests, replies = enter_worker()

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    rewards, message = _loaded(json.loads(requests.readline())["functions"])
    reply(message)
    for line in requests:
        for index in json.loads(line)["functions"]:
            # Decoded for each function, so that one that changes its arguments changes nothing for the next.
            message = _scored(rewards[index], json.loads(line))
            reply(message)
            if "error" in message:
                break


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
