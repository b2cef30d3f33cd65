"""Who may import whom, and what stays light."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "ullage"
LIGHT_ROOMS = ("base", "config", "telemetry", "rewards", "environments", "planner", "dashboard")
HEAVY = ("torch", "transformers", "vllm", "sglang", "ray")

LOAD = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted(set({heavy!r}) & set(sys.modules)))
"""


def loaded_by(modules):
    """The heavy packages in memory after importing `modules` in a fresh process."""
    command = [sys.executable, "-c", LOAD.format(heavy=HEAVY), *modules]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def modules_of(room):
    for path in sorted((PACKAGE / room).rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_import_contracts_are_kept():
    linter = Path(sys.executable).with_name("lint-imports")
    process = subprocess.run([linter, "--no-cache"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout


def test_the_package_itself_is_light():
    assert loaded_by(["ullage"]) == []


# `data` may use transformers inside functions, but importing it must not.
@pytest.mark.parametrize("room", [room for room in (*LIGHT_ROOMS, "data") if (PACKAGE / room).is_dir()])
def test_light_room_loads_nothing_heavy(room):
    assert loaded_by(modules_of(room)) == []


def test_the_check_itself_sees_torch():
    assert "torch" in loaded_by(["ullage.engine.checkpoint"])


def test_every_light_room_is_under_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    light = next(contract for contract in contracts if contract["name"].startswith("Light rooms"))
    present = {f"ullage.{room}" for room in LIGHT_ROOMS if (PACKAGE / room).is_dir()}
    assert present == set(light["source_modules"])


def test_every_room_but_rollout_is_closed_to_inference_engines():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    engines = next(contract for contract in contracts if contract["name"].startswith("Inference engines"))
    rooms = {f"ullage.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    assert rooms - {"ullage.rollout"} == set(engines["source_modules"])
