"""Real servers: `ullage serve` on a free port, in forks of a process that has already loaded torch."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

END_TO_END = Path(__file__).parent.parent / "end_to_end"
READY = re.compile(r"^serving (\S+) at (http://\S+)/v1 ", re.MULTILINE)


class Forks:
    """Command lines in forks of one warm process; see tests/end_to_end/fork_server.py."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0
        path = os.pathsep.join([str(END_TO_END), os.environ["PYTHONPATH"]])
        self.process = subprocess.Popen(
            [sys.executable, END_TO_END / "fork_server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def serve(self, model, *arguments, **environment):
        self.count += 1
        out, err = (self.folder / f"{self.count}.{name}" for name in ("out", "err"))
        words = ["serve", str(model), "--port", "0", *map(str, arguments)]
        order = {"arguments": words, "environment": environment, "changes": [], "stdout": str(out), "stderr": str(err)}
        return Server(self, self.ask(order), out, err)


class Server:
    """One running `ullage serve`."""

    def __init__(self, forks, pid, out, err):
        self.forks, self.pid, self.out, self.err = forks, pid, out, err
        until = time.monotonic() + 60
        while not (ready := READY.search(self.log)):
            assert time.monotonic() < until, self.log
            os.kill(pid, 0)
            time.sleep(0.02)
        self.name, self.url = ready.groups()
        self.code = None

    @property
    def log(self):
        return self.err.read_text() if self.err.exists() else ""

    def health(self):
        return httpx.get(f"{self.url}/health").json()

    def wait_until(self, condition):
        """The health that meets the condition."""
        until = time.monotonic() + 30
        while not condition(health := self.health()):
            assert time.monotonic() < until, health
            time.sleep(0.01)
        return health

    def stop(self, number=signal.SIGTERM):
        """Its exit code; what it said has no traceback, and nothing on stdout."""
        if self.code is None:
            os.kill(self.pid, number)
            self.code = self.forks.ask({"wait": self.pid})
            assert "Traceback" not in self.log, self.log
            assert self.out.read_text() == ""
        return self.code


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    made = Forks(tmp_path_factory.mktemp("servers"))
    yield made
    made.process.stdin.close()
    made.process.wait(10)


@pytest.fixture(scope="session")
def server(forks, tiny_model):
    """A tiny model with four slots, for everybody."""
    started = forks.serve(tiny_model, "--slots", 4)
    yield started
    assert started.stop() == 0


@pytest.fixture(scope="session")
def client(server):
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
