"""The command `ullage`: finds the verb, parses its line, runs it, and turns every failure into a code and two lines."""

import argparse
import difflib
import errno
import os
import re
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

import ullage
from ullage.base.allocator import expand_segments
from ullage.base.errors import InterruptedRunError, UllageError, UsageError, WriteError
from ullage.cli.errors_text import report, report_bug, show_traceback

_OVERRIDE = re.compile(r"(--)?[A-Za-z_]\w*(\.\w+)+=|--[A-Za-z_]\w*(\.\w+)+$")


class Verb(NamedTuple):
    """What `ullage --help` says about a verb without importing it."""

    help: str
    takes_overrides: bool = False


VERBS: dict[str, Verb] = {
    "demo": Verb("train a small real model on arithmetic and watch it learn, on this machine", takes_overrides=True),
    "plan": Verb("predict memory by phase, from a model or a config, without loading anything", takes_overrides=True),
    "advise": Verb("what these GPUs can train, or what a model needs"),
    "init": Verb("print or write a commented starter config"),
    "train": Verb("train from a config file", takes_overrides=True),
    "resume": Verb("continue a run that was stopped", takes_overrides=True),
    "eval": Verb("score a run or a model on held-out data", takes_overrides=True),
    "chat": Verb("talk to a run or a model"),
    "serve": Verb("serve a run or a model to OpenAI clients"),
    "export": Verb("write a run's weights as a Hugging Face folder, or its adapter as a PEFT folder"),
    "ls": Verb("list runs"),
    "bench": Verb("measure speed and memory on this machine"),
    "doctor": Verb("check the installation and, given a model, its invariants"),
}


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    # Before torch is loaded: threads that spin while they wait make a busy machine ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    expand_segments()
    words = list(sys.argv[1:] if argv is None else argv)
    options = words[: words.index("--")] if "--" in words else words
    debug, as_json = "--debug" in options, "--json" in options
    try:
        return _guarded([word for word in words if word != "--debug"], debug=debug, as_json=as_json)
    except BrokenPipeError as error:
        if _stdout_is_broken():  # the reader, such as `head`, has seen enough
            return 0
        return report_bug(error, as_json=as_json)


def _guarded(words: list[str], *, debug: bool, as_json: bool) -> int:
    try:
        code = _dispatch(words)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except UllageError as error:
        if debug:
            show_traceback()
        return report(error, as_json=as_json)
    except KeyboardInterrupt:
        return report(InterruptedRunError("interrupted"), as_json=as_json)
    except BrokenPipeError:
        raise
    except SystemExit as stop:  # argparse, after --help and --version
        return stop.code if isinstance(stop.code, int) else 0
    except Exception as error:  # noqa: BLE001 -- the last line of defence: users get one line, --debug the traceback
        if debug:
            show_traceback()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _turn_stdout_away()  # it may be what is full
            return report(WriteError(f"cannot write: {error.strerror}", "make room, or write elsewhere"), as_json=False)
        return report_bug(error, as_json=as_json)


def _dispatch(words: list[str]) -> int:
    name = next((word for word in words if not word.startswith("-")), None)
    known = available_verbs()
    if name is not None and name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"one of: {', '.join(known)}"
        raise UsageError(f"no verb {name!r}", hint)
    module = import_module(f"ullage.cli.{name}") if name is not None else None
    parser = Parser(
        prog="ullage",
        description=(ullage.__doc__ or "").splitlines()[0],
        allow_abbrev=False,
        epilog="ullage VERB --help says more about one.",
    )
    parser.add_argument("--version", action="version", version=f"ullage {ullage.__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for verb in known:
        chosen = verbs.add_parser(verb, help=VERBS[verb].help, description=VERBS[verb].help, allow_abbrev=False)
        if module is not None and verb == name:
            module.add_arguments(chosen)
    if module is None or name is None:
        parser.parse_args(words)
        parser.print_help()
        return 0
    overrides, words = _split_overrides(words, name)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        told = f"see ullage {name} --help; a value with spaces goes in quotes"
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}", told)
    code: int = module.run(arguments, overrides)
    return code


def _split_overrides(words: list[str], verb: str) -> tuple[list[str], list[str]]:
    if VERBS[verb].takes_overrides:
        from ullage.config.overrides import split_overrides  # loads the whole tree of keys: not for light verbs

        return split_overrides(words)
    refused = [word for word in words if _OVERRIDE.match(word)]
    if refused:
        raise UsageError(f"{verb} takes no config overrides: {' '.join(refused)}", f"see ullage {verb} --help")
    return [], words


def available_verbs() -> list[str]:
    """The verbs of the table that this installation has."""
    return [verb for verb in VERBS if (Path(__file__).parent / f"{verb}.py").is_file()]


def _stdout_is_broken() -> bool:
    """Whether nobody reads stdout any more; then it is turned away, or the interpreter would complain at exit."""
    if sys.stdout is None:
        return False
    watch = select.poll()
    watch.register(sys.stdout.fileno(), select.POLLOUT)
    broken = any(event & select.POLLERR for _, event in watch.poll(0))
    if broken:
        _turn_stdout_away()
    return broken


def _turn_stdout_away() -> None:
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
