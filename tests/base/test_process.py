"""One worker process, seen from the run."""

import json
import threading
from contextlib import contextmanager

import pytest

from ullage.base.process import WorkerLost, WorkerProcess

REQUEST = {
    "prompt": "",
    "target": "",
    "source": "",
    "extra": {},
    "response_length": 0,
    "response_ids": None,
    "functions": [0],
}


@contextmanager
def worker(source, tmp_path, closing=None):
    path = tmp_path / "reward.py"
    path.write_text(source)
    started = WorkerProcess("ullage.rewards.worker", closing or threading.Event())
    try:
        started.send(json.dumps({"functions": [{"path": str(path), "name": "", "kwargs": {}}]}).encode(), 20.0)
        assert "rewards" in started.receive(20.0)
        yield started
    finally:
        started.stop()


def ask(started, response):
    started.send(json.dumps({**REQUEST, "response": response}).encode(), 20.0)
    return started.receive(20.0)["score"]


def test_request_larger_than_a_pipe(tmp_path):
    with worker("def score(response): return len(response)", tmp_path) as started:
        assert ask(started, "x" * 3_000_000) == 3_000_000.0


def test_limits_and_environment_of_user_code(tmp_path):
    source = (
        "import os, resource\n"
        "def score(response):\n"
        "    half = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 2\n"
        "    assert 0 < resource.getrlimit(resource.RLIMIT_DATA)[0] <= half\n"
        "    assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0\n"
        "    assert open('/proc/self/oom_score_adj').read().strip() == '1000'\n"
        "    return os.environ['OMP_NUM_THREADS']  == '1'\n"
    )
    with worker(source, tmp_path) as started:
        assert ask(started, "") == 1.0


def test_lone_surrogates_survive(tmp_path):
    with worker("def score(response): return ord(response)", tmp_path) as started:
        assert ask(started, "\udc80") == 0xDC80


def test_reply_that_user_code_wrote(tmp_path):
    source = (
        "import os\n"
        "def score(response):\n"
        "    for descriptor in range(3, 20):\n"
        "        try: os.write(descriptor, b'nonsense\\n')\n"
        "        except OSError: pass\n"
    )
    with (
        worker(source, tmp_path) as started,
        pytest.raises(WorkerLost, match="wrote into the worker's own pipe"),
    ):
        ask(started, "")


def test_closing_ends_a_wait(tmp_path):
    closing = threading.Event()
    with worker("import time\ndef score(response): time.sleep(60)", tmp_path, closing) as started:
        threading.Timer(0.1, closing.set).start()
        with pytest.raises(WorkerLost, match="the pool was closed"):
            ask(started, "")


def test_stop_may_be_repeated(tmp_path):
    with worker("def score(response): return 1", tmp_path) as started:
        started.stop()
        assert started.ended()


def test_worker_that_cannot_start_says_why(monkeypatch, tmp_path):
    (tmp_path / "resource.py").write_text("raise RuntimeError('not the real one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = WorkerProcess("ullage.rewards.worker", threading.Event())
    with pytest.raises(WorkerLost, match=r"^exited with code 1: RuntimeError: not the real one$"):
        started.receive(20.0)
    started.stop()
