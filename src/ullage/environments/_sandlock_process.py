"""Runs a Python program under sandlock: `python _sandlock_process.py MEMORY_BYTES CODE READABLE...`, run as a script.

A process of its own, because sandlock keeps threads that a fork of its caller would lose. Imports nothing of this
package. The program dies with this process; it may start threads, but no process that could outlive it.
"""

import sys

KILLED = 137
"""As a shell says it."""


def main(memory_bytes: str, code: str, *readable: str) -> int:
    """The program's exit code; what it prints goes to our own output."""
    import sandlock  # an extra: whatever reads this file without it may do so

    sandbox = sandlock.Sandbox(
        fs_readable=[*readable, "/dev/null", "/dev/zero", "/dev/urandom"],
        max_memory=int(memory_bytes),
        max_processes=1,
        no_coredump=True,
        cwd="/",
    )
    with sandbox.popen([sys.executable, "-I", "-B", "-c", code]) as process:
        exit_code: int = process.wait().exit_code
    return exit_code if exit_code >= 0 else KILLED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
