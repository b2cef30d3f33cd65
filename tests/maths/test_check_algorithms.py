"""The check against stored values of verl passes on the given file and notices every kind of deviation."""

import copy
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden"
SCRIPT = GOLDEN / "check_algorithms.py"
STORED = json.loads((GOLDEN / "algorithms.json").read_text())
main = runpy.run_path(str(SCRIPT))["main"]


def test_as_a_script():
    done = subprocess.run(
        [sys.executable, SCRIPT, GOLDEN / "algorithms.json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "6 cases, 50 functions, 0 above 1e-09"
    assert len(lines) == 51
    assert all(float(line.split()[-1]) <= 1e-9 for line in lines[:-1])


def change_number(case, kind, index, key):
    """Adds 1e-8 to one stored number, on the first token of the first row (always sampled)."""
    entry = case["expected"][kind][index]
    if isinstance(entry[key], list):
        entry[key][0][0] += 1e-8
    else:
        entry[key] += 1e-8


@pytest.mark.parametrize(
    ("kind", "key", "printed"),
    [
        ("advantages", "advantages", "advantages gae"),
        ("advantages", "returns", "returns gae"),
        ("policy_loss", "loss", "loss vanilla"),
        ("policy_loss", "grad", "gradient vanilla"),
        ("kl", "value", "kl kl"),
        ("kl", "grad_of_masked_sum", "gradient kl kl"),
        ("aggregate", "value", "aggregate token-mean"),
        ("value_loss", "value", "value loss"),
    ],
)
def test_a_deviation_of_1e_8_is_found(kind, key, printed, tmp_path, capsys):
    case = copy.deepcopy(STORED["cases"][5])
    change_number(case, kind, 0, key)
    (tmp_path / "changed.json").write_text(json.dumps({"cases": [case]}))
    assert main([str(tmp_path / "changed.json")]) == 1
    bad = [line for line in capsys.readouterr().out.splitlines() if line.endswith("too large")]
    assert [line[:45].strip() for line in bad] == [printed]


def test_masked_places_are_not_compared(tmp_path):
    case = copy.deepcopy(STORED["cases"][5])
    assert case["inputs"]["mask"][0][2] == 0
    case["expected"]["advantages"][0]["advantages"][0][2] = 1e6
    case["expected"]["policy_loss"][0]["grad"][0][2] = 1e6
    (tmp_path / "changed.json").write_text(json.dumps({"cases": [case]}))
    assert main([str(tmp_path / "changed.json")]) == 0


@pytest.mark.parametrize("kind", ["advantages", "policy_loss", "kl"])
def test_an_unknown_function_fails(kind, tmp_path, capsys):
    case = copy.deepcopy(STORED["cases"][5])
    case["expected"][kind][0]["name"] = "novel"
    case["expected"]["surprise"] = [{}]
    (tmp_path / "changed.json").write_text(json.dumps({"cases": [case]}))
    assert main([str(tmp_path / "changed.json")]) == 1
    unknown = [line for line in capsys.readouterr().out.splitlines() if line.endswith("not known here")]
    assert len(unknown) == 2


def test_nan_fails(tmp_path):
    case = copy.deepcopy(STORED["cases"][5])
    case["inputs"]["values"][0][0] = float("nan")
    (tmp_path / "changed.json").write_text(json.dumps({"cases": [case]}))
    assert main([str(tmp_path / "changed.json")]) == 1


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_something_else_is_refused(text, tmp_path, capsys):
    (tmp_path / "other.json").write_text(text)
    assert main([str(tmp_path / "other.json")]) == 2
    assert "is not a file of cases" in capsys.readouterr().err


def test_no_cases_prove_nothing(tmp_path):
    (tmp_path / "empty.json").write_text('{"cases": []}')
    assert main([str(tmp_path / "empty.json")]) == 1


def test_usage(capsys):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
