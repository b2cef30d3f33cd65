"""Runs Python that a model wrote: no network, no files of ours, nothing to write to, limits on time, memory and output.

Bubblewrap (namespaces) or sandlock (Landlock and seccomp), whichever works on this machine; neither needs privileges.
The program reads the system's libraries and this Python's packages, and sees no environment variables of the run.
"""

import contextlib
import errno
import importlib.util
import math
import os
import platform
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ullage.base.errors import ConfigError

PROBE_SECONDS = 20.0
MAX_CODE_BYTES = 100_000
"""Linux allows 128 KiB for one argument of a command."""
MAX_OPEN_FILES = 64
LIBRARY_BYTES = 256 << 20
"""Room in the address space for what is mapped from files: Python, numpy, pandas."""
KILLED = 128
"""Exit codes above it are signals, as shells count them."""
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, 56, (57, 58, 272, 308, 29, 68)),
    "aarch64": (0xC00000B7, 220, (97, 268, 194, 186)),
}
"""By machine: the kernel's number for it, `clone`, and those refused: `fork`, `vfork`, `unshare`, `setns`; `shmget` and
`msgget`, whose memory belongs to no process and so is under no limit. The first two are not on aarch64."""
CLONE3 = 435
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # else every thread reserves 64 MiB of address space
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use."""

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 4096


Command = Callable[[str, Limits, int], list[str]]
"""The command line of one kind of sandbox, from the program, its limits and the descriptor of `no_processes`."""


class Unavailable(Exception):  # noqa: N818 -- says why a kind of sandbox cannot be used here
    """This kind of sandbox is not there."""


class Sandbox:
    """A way to run untrusted Python that was tried out on this machine; ConfigError where there is none."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        failures = []
        for kind, command in (("bubblewrap", bubblewrap_command), ("sandlock", sandlock_command)):
            try:
                output, _ = run(command, "print(6 * 7)", Limits(seconds=PROBE_SECONDS))
            except Unavailable as reason:
                output = str(reason)
            if output == "42\n":
                self.kind = kind
                self._command = command
                return
            failures.append(f"{kind}: {' '.join(output.split()) or 'no output'}")
        raise ConfigError(
            f"the python tool needs a sandbox, and none works here ({'; '.join(failures)})",
            "install one: the system's package bubblewrap (where user namespaces are allowed), or pip install "
            "'ullage[sandbox]' (Linux 6.7 or newer); or leave python out of environment.kwargs.tools",
        )

    def run(self, code: str, seconds: float) -> tuple[str, bool]:
        """What the program printed, errors included, and whether it succeeded; in less time than usual if need be."""
        return run(self._command, code, replace(self.limits, seconds=min(seconds, self.limits.seconds)))


def run(command: Command, code: str, limits: Limits) -> tuple[str, bool]:
    """What a program prints under one kind of sandbox, and whether it succeeded."""
    try:
        encoded = code.encode()
    except UnicodeEncodeError:  # half a character: a model can write it
        return "Error: the program is not valid text\n", False
    if len(encoded) > MAX_CODE_BYTES or b"\0" in encoded:
        return f"Error: the program is longer than {MAX_CODE_BYTES} bytes, or has a zero byte\n", False
    rules, write = os.pipe()
    os.write(write, no_processes())
    os.close(write)
    try:
        process = subprocess.Popen(
            command(code, limits, rules),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
            cwd="/",
            pass_fds=(rules,),
            start_new_session=True,
            preexec_fn=lambda: limit(limits),
        )
    except OSError as error:  # out of processes or memory
        raise Unavailable(f"cannot be started: {error}") from error
    finally:
        os.close(rules)
    with process:
        output, problem = read(process, limits)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code_of_exit = process.wait()
    if problem is None and not 0 <= code_of_exit <= KILLED:
        problem = f"killed; it may use {limits.memory_bytes >> 20} MiB of memory"
    text = output.decode(errors="replace")
    return (text if problem is None else f"{text}\nError: {problem}\n"), code_of_exit == 0 and problem is None


def limit(limits: Limits) -> None:
    """In the new process, before it becomes the sandbox: what is inherited by everything in it."""
    seconds = math.ceil(limits.seconds) + 1
    for name, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_DATA, limits.memory_bytes),
        (resource.RLIMIT_AS, limits.memory_bytes + LIBRARY_BYTES),  # what is shared is no data
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ):
        resource.setrlimit(name, (value, value))


def read(process: "subprocess.Popen[bytes]", limits: Limits) -> tuple[bytes, str | None]:
    """Everything it prints until it ends or meets a limit; and that limit."""
    assert process.stdout is not None, "a pipe was asked for"
    deadline = time.monotonic() + limits.seconds
    output = b""
    while True:
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return output, f"timeout after {limits.seconds:g} s"
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return output, None
        output += chunk
        if len(output) > limits.output_bytes:
            return output[: limits.output_bytes], f"more than {limits.output_bytes} bytes of output"


def readable() -> list[str]:
    """The system's libraries and this Python."""
    folders = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix, sys.prefix)
    return [folder for folder in dict.fromkeys(folders) if Path(folder).exists()]


def sandlock_command(code: str, limits: Limits, rules: int) -> list[str]:
    if importlib.util.find_spec("sandlock") is None:
        raise Unavailable("not installed")
    script = Path(__file__).with_name("_sandlock_process.py")
    return [sys.executable, "-I", str(script), str(limits.memory_bytes), code, *readable()]


def bubblewrap_command(code: str, limits: Limits, rules: int) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise Unavailable("not installed")
    if platform.machine() not in SYSTEM_CALLS:
        raise Unavailable(f"no rules for {platform.machine()}")
    command = [program, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    for folder in readable():
        command += ["--ro-bind", folder, folder]
    command += ["--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", str(rules)]
    return [*command, "--", sys.executable, "-I", "-B", "-c", code]


def no_processes() -> bytes:
    """A seccomp filter for bubblewrap: threads yes, processes no. Limits are per process, and root is exempt from some.

    The layout of an instruction is linux/filter.h's, of what it looks at linux/seccomp.h's.
    """
    load, jump_equal, jump_greater, jump_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, unknown = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    number_at, machine_at, flags_at = 0, 4, 16
    x32, clone_thread = 0x40000000, 0x00010000
    machine, clone, refused = SYSTEM_CALLS.get(platform.machine(), (0, 0, ()))
    rules = [(load, 0, 0, machine_at), (jump_equal, 1, 0, machine), (give, 0, 0, kill)]
    rules += [(load, 0, 0, number_at), (jump_greater, 0, 1, x32), (give, 0, 0, kill)]
    for call, answer in ((CLONE3, unknown), *((call, refuse) for call in refused)):  # without clone3, libc uses clone
        rules += [(jump_equal, 0, 1, call), (give, 0, 0, answer)]
    rules += [(jump_equal, 0, 3, clone), (load, 0, 0, flags_at), (jump_set, 1, 0, clone_thread), (give, 0, 0, refuse)]
    rules += [(give, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *rule) for rule in rules)
