"""`ullage serve`: an OpenAI-compatible endpoint for a run, a checkpoint or a model; what it says goes to stderr."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.base.errors import ConfigError, InterruptedRunError, UsageError

if TYPE_CHECKING:
    from ullage.run.locate import Located

HELP = "serve a run or a model to OpenAI clients"
KEY_VARIABLE = "ULLAGE_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a run, a checkpoint, a model folder, a GGUF file or a Hub id")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000; 0 takes a free one")
    parser.add_argument("--slots", type=int, metavar="N", help="answers drawn at once (default: 16; 128 on a GPU)")
    parser.add_argument("--max-length", type=int, metavar="N", help="most tokens of a prompt and its answer together")
    parser.add_argument("--max-waiting", type=int, default=1024, metavar="N", help="answers that may wait for a slot")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what clients must send as their key; ${KEY_VARIABLE} is not seen by other users of this machine",
    )


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    del overrides
    for name in ("slots", "max_length", "max_waiting"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if not 0 <= arguments.port < 2**16:
        raise UsageError(f"--port {arguments.port}: must be at most {2**16 - 1}", "0 takes a free one")
    key = _api_key(arguments)
    listener = _bind(arguments.host, arguments.port)  # before the model is loaded, which can take minutes

    from ullage.run.locate import locate

    found = locate(arguments.model)
    for warning in found.warnings:
        _say(warning)
    with listener:
        return _serve(arguments, found, key, listener)


def _api_key(arguments: argparse.Namespace) -> str | None:
    from ullage.serve.guard import is_loopback

    key: str | None = arguments.api_key or os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(arguments.host):
        raise UsageError(
            f"--host {arguments.host}: other machines could use this server without a key",
            f"set ${KEY_VARIABLE} or give --api-key, or listen on 127.0.0.1",
        )
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise UsageError("the API key must be printable ASCII without blanks", "choose another one")
    return key


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}", "choose another --port or --host"
        ) from None
    return listener


def _serve(arguments: argparse.Namespace, found: Located, key: str | None, listener: socket.socket) -> int:
    try:
        from ullage.serve.server import serve
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("starlette", "uvicorn"):
            raise
        raise ConfigError(f"serving needs the package {package}", "pip install 'ullage[serve]'") from None

    from ullage.config.tree import Data
    from ullage.model.load import load_model
    from ullage.model.target import find_target
    from ullage.serve.guard import Guard
    from ullage.serve.room import open_engine
    from ullage.serve.service import Service
    from ullage.serve.worker import Worker

    config = found.config
    _say(f"loading {found.weights}")
    dtype = "auto" if config is None else config.actor_rollout_ref.model.dtype
    model = load_model(found.weights, find_target("auto", 0), dtype=dtype)
    data = Data() if config is None else config.data
    if data.system_prompt is not None:
        _say("chats without a system message get the one this run was trained with")
    engine = open_engine(model, slots=arguments.slots, max_length=arguments.max_length, say=_say)
    service = Service(
        model,
        Worker(engine),
        name=served_name(arguments.model, found),
        max_length=engine.max_length,
        max_waiting=arguments.max_waiting,
        data=data,
    )
    port = listener.getsockname()[1]
    shown = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    ready = (
        f"serving {service.name} at http://{shown}:{port}/v1 "
        f"({engine.slots} slots, {engine.max_length} tokens each at most); Ctrl-C stops"
    )
    received = serve(service, Guard(arguments.host, key), listener, _say, lambda: _say(ready))
    if received == signal.SIGINT:
        raise InterruptedRunError("interrupted")
    return 0


def served_name(given: str, found: Located) -> str:
    """What clients call the model: a run by its name, a checkpoint by run and step, a folder or file by its name."""
    if found.run is not None:
        named = found.run.path.resolve().name
        is_whole_run = not (Path(given) / "manifest.json").is_file()
        return named if is_whole_run else f"{named}/step_{found.step}"
    path = Path(given).expanduser()
    return path.resolve().name if path.exists() else given


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
