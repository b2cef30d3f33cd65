"""Records the demo: three seeds, accuracy before and after, seconds of training. Writes results/demo_cpu.json."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=RESULTS / "demo_cpu.json")
    arguments = parser.parse_args()
    runs = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as root:
            command = [sys.executable, "-m", "ullage", "demo", "--json", "--seed", str(seed), "--root", root]
            outcome = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        kept = ("accuracy_before", "accuracy_after", "held_out_problems", "samples_each", "training_seconds", "steps")
        runs.append({"seed": seed} | {name: outcome[name] for name in kept})
        print(runs[-1], file=sys.stderr)
    record = {
        "command": "python benchmarks/demo.py",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "cpu": _cpu_name(),
            "cores": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "ullage")}
        | {"python": platform.python_version()},
        "runs": runs,
    }
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
