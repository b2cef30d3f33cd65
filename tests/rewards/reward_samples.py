"""Reward functions that misbehave when the response asks for it; given to the pool as a user's file."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time


def score(prompt, response, target, extra):
    action, _, value = response.partition(" ")
    return ACTIONS[action](value, prompt, target, extra)


def raise_error(value, *_):
    return 1 / float(value)


def leave_child(value, *_):
    return float(subprocess.Popen(["sleep", "60"], start_new_session=value == "detached").pid)


def fork_holding_the_pipe(*_):
    if os.fork() == 0:
        time.sleep(60)
    os._exit(5)


def numpy_number(value, *_):
    import numpy  # here, to keep the start of a worker light

    return numpy.float32(value)


def shout(value, *_):
    for stream in (sys.stdout, sys.stderr):
        stream.write("x" * int(value))
        stream.flush()
    os.write(1, b'{"score": 77.0, "metrics": {}}\n')
    return 1.0


def change_arguments(value, prompt, target, extra):
    assert prompt == [{"role": "user", "content": "hi"}]
    assert target == [1, 2]
    assert extra == {"nested": {"key": [1]}}
    prompt.clear()
    target.clear()
    extra["nested"]["key"].append(2)
    return 1.0


def wait_a_little(value, *_):
    time.sleep(random.random() / 20)
    return float(value)


ACTIONS = {
    "number": lambda value, *_: float(value),
    "hang": lambda *_: time.sleep(60),
    "spin": lambda *_: 9**9**9,
    "raise": raise_error,
    "quit": lambda value, *_: sys.exit(int(value)),
    "exit": lambda value, *_: os._exit(int(value)),
    "segfault": lambda *_: ctypes.string_at(0),
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "kill_group": lambda *_: os.killpg(0, signal.SIGKILL),
    "stop": lambda *_: os.kill(os.getpid(), signal.SIGSTOP),
    "memory": lambda *_: len(bytearray(1 << 60)),
    "none": lambda *_: None,
    "text": lambda value, *_: value,
    "list": lambda *_: [1.0, 2.0],
    "numpy": numpy_number,
    "flood": lambda *_: {"score": 1.0, **{f"metric_{i}": 1.0 for i in range(100_000)}},
    "child": leave_child,
    "orphan": fork_holding_the_pipe,
    "close": lambda *_: os.closerange(3, 100),
    "shout": shout,
    "change": change_arguments,
    "wait": wait_a_little,
    "read": lambda *_: len(sys.stdin.read()),
    "pid": lambda *_: os.getpid(),
}
