"""The process environments run in: `python -m ullage.environments._worker`, JSON lines in and out. Light to import.

The first line names the environment, which is built once; the reply describes it or says what is wrong. Then a fork of
this process plays each episode, from the state the constructor left: one that hangs, crashes or changes what it shares
costs itself. Requests are answered one at a time; a call that takes too long is killed, with its episode.
"""

import contextlib
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ullage.base.errors import ConfigError
from ullage.base.extensions import find
from ullage.base.guard import enter_worker
from ullage.base.user_code import printable, raised
from ullage.environments import Environment, Row, Turn

MAX_REPLY_BYTES = 1 << 19
"""Of one turn: half of what the run accepts, so that a longer one costs its episode and not this process."""
MAX_EPISODES = 256
"""At once: each is a process."""
OPEN_FILES = 1 << 16
"""The limit that is asked for, where the system's is lower; each episode has one."""
SPARE_FILES = 64
"""For whatever the environment has open."""


def main() -> None:
    """Load, then play until the input ends."""
    requests, replies = enter_worker()
    order = json.loads(requests.readline())
    environment, message = loaded(order["name"], order["kwargs"])
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()
    if environment is None:
        return
    gc.freeze()  # what is loaded stays shared between the forks
    episodes: dict[int, Episode] = {}
    for line in requests:
        request = json.loads(line)
        number = request.pop("episode")
        reply: dict[str, Any] = {"error": "the episode was lost with its worker"}
        if "row" in request:
            others = [other.connection.fileno() for other in episodes.values()]
            try:
                episodes[number] = Episode(environment, [requests.fileno(), replies.fileno(), *others])
            except OSError as error:  # out of processes, memory or file descriptors
                reply = {"error": f"the episode cannot be started: {error}"}
        episode = episodes.get(number)
        if episode:
            reply = episode.call(line, request["seconds"])
        if episode and (request.get("end") or reply.get("done") or "error" in reply):
            episodes.pop(number).kill()
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


class Episode:
    """A fork of this process, and the line to it."""

    def __init__(self, environment: Environment, keep_out: list[int]) -> None:
        self.connection, theirs = socket.socketpair()
        self.poller = select.poll()  # select() knows no descriptor above 1023
        self.poller.register(self.connection, select.POLLIN)
        self.received = b""
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor in (*keep_out, self.connection.fileno()):
                os.close(descriptor)
            play(environment, theirs)
        theirs.close()
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.pid, self.pid)

    def call(self, line: bytes, seconds: float) -> dict[str, Any]:
        """The reply to one request, or the error that ends the episode."""
        self.connection.settimeout(seconds)
        try:
            self.connection.sendall(line)
        except OSError:
            return {"error": self._ending()}
        deadline = time.monotonic() + seconds
        while b"\n" not in self.received:
            if not self.poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                return {"error": f"timeout after {seconds:g} s"}
            chunk = self.connection.recv(1 << 16)
            if not chunk:
                return {"error": self._ending()}
            self.received += chunk
            if len(self.received) > MAX_REPLY_BYTES:
                return {"error": f"returned more than {MAX_REPLY_BYTES} bytes"}
        reply, _, self.received = self.received.partition(b"\n")
        result: dict[str, Any] = json.loads(reply)
        return result

    def kill(self) -> None:
        self.connection.close()
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _ending(self) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # it may live on without its line
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with code {code}"


def play(environment: Environment, connection: socket.socket) -> NoReturn:
    """The fork's life: one episode."""
    code = 1
    try:
        os.setpgid(0, 0)
        with connection.makefile("rwb") as stream:
            for line in stream:
                stream.write(json.dumps(called(environment, json.loads(line))).encode() + b"\n")
                stream.flush()
        code = 0
    finally:
        os._exit(code)


def called(environment: Environment, request: dict[str, Any]) -> dict[str, Any]:
    """What the environment's method returned, or why that is unusable."""
    method = "reset" if "row" in request else "step"
    try:
        if "row" in request:
            environment.reset(Row(**request["row"]))
            return {}
        return {} if request.get("end") else checked(environment.step(request["action"]))
    except BaseException as error:  # noqa: BLE001 -- user code: whatever it raises costs one episode
        file = sys.modules[type(environment).__module__].__file__
        return {"error": f"{method} {raised(error, file)}"}


def checked(turn: Turn) -> dict[str, Any]:
    """A turn as plain JSON."""
    if not isinstance(turn, Turn):
        return {"error": f"step returned a value of type {type(turn).__name__}, not a Turn"}
    numbers = {"reward": turn.reward, **turn.metrics}
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers.values()):
        return {"error": f"step returned a number that is none: {printable(str(numbers))}"}
    if not turn.observation and not turn.done:
        return {"error": "step returned neither an observation nor done"}
    if not isinstance(turn.observation, str | None) and not are_messages(turn.observation):
        return {"error": "step returned an observation that is neither text nor messages with role and content"}
    return asdict(turn)


def are_messages(value: Any) -> bool:  # noqa: ANN401 -- whatever a user's step returned
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in value
    )


def loaded(name: str, kwargs: dict[str, Any]) -> tuple[Environment | None, dict[str, Any]]:
    """The environment and its description; or None and what is wrong."""
    sys.path.append(os.getcwd())  # last, so that no file beside the config can hide an installed module
    if name.endswith(".py"):
        sys.path.append(str(Path(name).expanduser().resolve().parent))
    try:
        environment = built(name, kwargs)
    except ConfigError as error:
        return None, {"problem": [error.cause, error.remedy]}
    schemas = getattr(environment, "tool_schemas", [])
    return environment, {"tool_schemas": schemas, "max_episodes": max_episodes()}


def max_episodes() -> int:
    """How many this process can have open at once; a limit that may be raised is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(soft, min(hard, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(1, min(MAX_EPISODES, files - SPARE_FILES))


def built(name: str, kwargs: dict[str, Any]) -> Environment:
    try:
        module = find("environments", name)
        maker = getattr(module, "Environment", None)
        if maker is None:
            raise ConfigError(f"{name} has no class Environment", "give it one, with reset(row) and step(action)")
        environment: Environment = maker(**kwargs)
    except ConfigError:
        raise
    except BaseException as error:  # user code at import and in the constructor
        remedy = "correct it, or environment.kwargs, which are the arguments of its constructor"
        raise ConfigError(f"the environment {name} cannot be made: it {raised(error, None)}", remedy) from error
    missing = [method for method in ("reset", "step") if not callable(getattr(environment, method, None))]
    if missing:
        remedy = "an environment has reset(row) and step(action)"
        raise ConfigError(f"{name}: class Environment has no {' and no '.join(missing)}", remedy)
    return environment


if __name__ == "__main__":
    main()
