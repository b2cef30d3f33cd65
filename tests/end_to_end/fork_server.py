"""Runs `ullage` command lines in children of a process that has already loaded torch: a start costs no import.

One JSON object per line on stdin; the answer is the child's pid, or its exit code as `subprocess` counts it. Nothing
here starts a thread, so a fork is a whole process. Not for checks of the start itself: those use real processes.
"""

import json
import os
import sys

import changes


def main():
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401 -- loaded lazily by transformers, and slowly

    import ullage.cli.train
    import ullage.run.assemble  # noqa: F401
    from ullage.cli.main import main as ullage_main

    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            prepare(order)
            sys.exit(ullage_main(order["arguments"]))
        print(pid, flush=True)


def prepare(order):
    """Make the child what a process started by a shell would be."""
    os.setsid()
    for path, flags, descriptor in (
        (os.devnull, os.O_RDONLY, 0),
        (order["stdout"], os.O_WRONLY | os.O_CREAT, 1),
        (order["stderr"], os.O_WRONLY | os.O_CREAT, 2),
    ):
        os.dup2(os.open(path, flags, 0o644), descriptor)
    os.environ.update(order["environment"])
    for change in order["changes"]:
        getattr(changes, change)()


if __name__ == "__main__":
    main()
