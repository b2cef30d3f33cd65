"""What runs leave behind: files, read and compared, and processes, of which there must be none."""

import json
import time
from pathlib import Path

TIMED = ("time/", "memory/")


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def metrics_of(run):
    """The rows of metrics.jsonl without what a clock or an allocator says."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in row.items() if not key.startswith(TIMED) and "per_second" not in key}
        for row in rows
    ]


def samples_of(run):
    return {path.name: path.read_text() for path in sorted((run / "samples").iterdir())}


def contents(folder):
    """Every file of a folder, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def outcome_of(run):
    return json.loads((run / "exit.json").read_text())


def assert_same_run(run, other, step=6):
    """Bit for bit: metrics, samples, weights, and the checkpoint of the last step with its optimizer."""
    assert metrics_of(run) == metrics_of(other)
    assert samples_of(run) == samples_of(other)
    assert contents(run / "final") == contents(other / "final")
    assert contents(run / "checkpoints" / f"step_{step}") == contents(other / "checkpoints" / f"step_{step}")


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_no_process_has(mark, seconds=5.0):
    """Processes that inherited the mark: guards of reward workers need a moment to end after a kill."""
    deadline = time.monotonic() + seconds
    while left := processes_with(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def processes_with(mark):
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"ULLAGE_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append((entry.name, (entry / "cmdline").read_bytes().replace(b"\0", b" ")))
        except OSError:  # it has ended meanwhile, or is a zombie
            continue
    return found
