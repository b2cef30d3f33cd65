"""Statistics and the table of the memory benchmark, by hand."""

import pytest

from ullage.bench.memory_table import (
    MIB,
    caps,
    errors,
    joined,
    needed_bytes,
    phases_of,
    quantile,
    relative,
    safety,
    summary,
    tables,
    targets,
    upper_bound,
    within,
)
from ullage.planner.components import CONTEXT, PROCESS

GIB = 1 << 30


def test_errors_by_hand():
    found = errors([0.01, -0.02, 0.03, -0.10])
    assert found == {
        "n": 4,
        "mean_percent": 4.0,
        "median_percent": 2.0,
        "p95_percent": 10.0,
        "worst_percent": -10.0,
        "under_share_percent": 50.0,
        "under_worst_percent": -10.0,
        "bias_percent": -2.0,
    }
    assert errors([]) == {"n": 0}
    assert errors([0.5])["under_worst_percent"] == 0.0


def test_a_quantile_is_one_of_the_values():
    values = [float(number) for number in range(20, 0, -1)]
    assert quantile(values, 0.95) == 19.0  # 19 of 20 are not above it
    assert quantile(values, 0.5) == 10.0
    assert quantile(values, 1.0) == 20.0
    assert quantile([7.0], 0.95) == 7.0


def test_the_bound_on_a_rate():
    # Nothing in n: (1 - p)^n = 0.05.
    assert upper_bound(0, 60) == pytest.approx(1 - 0.05 ** (1 / 60), abs=1e-12)
    assert upper_bound(0, 60) < 0.05
    # One in two: 1 - p^2 = 0.05.
    assert upper_bound(1, 2) == pytest.approx(0.95**0.5, abs=1e-12)
    assert upper_bound(2, 2) == 1.0
    assert upper_bound(0, 0) == 1.0


def test_a_phase_is_right_within_the_larger_tolerance():
    assert within(1200 * MIB, 1000 * MIB)
    assert not within(1201 * MIB, 1000 * MIB)
    assert within(10300 * MIB, 10000 * MIB)
    assert not within(9699 * MIB, 10000 * MIB)


def test_the_optimizers_step_is_part_of_the_measured_update():
    predicted = {"update": 5, "optimizer_step": 7, "rollout": 3}
    assert phases_of(predicted, ["update", "rollout"]) == {"update": 7, "rollout": 3}
    assert phases_of(predicted, ["update"], add=True) == {"update": 12, "rollout": 3}
    assert phases_of(predicted, ["update", "optimizer_step"]) == predicted
    assert phases_of({"optimizer_step": 7}, ["update"]) == {"optimizer_step": 7}


def predicted(key, *, number=0, model="0.5B", method="full", trace=10 * GIB, closed=11 * GIB, least=10 * GIB):
    return {
        "kind": "predicted",
        "key": key,
        "number": number,
        "model": model,
        "method": method,
        "text": model,
        "settings": {},
        "closed_form": {"update": closed, "rollout": 2 * GIB},
        "closed_form_host_bytes": 2 * GIB,
        "trace": {"update": trace, "rollout": 2 * GIB},
        "least_bytes": least,
        "host_bytes": 2 * GIB,
        "rivals": {"accelerate estimate-memory": 5 * GIB},
        "step_seconds": {"update": 1.0, "optimizer_step": 0.5},
        "seconds": {"closed form": 0.001, "trace": 4.0},
        "code": "a",
    }


def measured(key, *, ran=True, peak=10 * GIB, host=2 * GIB):
    return {
        "kind": "measured",
        "key": key,
        "number": 0,
        "ran": ran,
        "why": None if ran else "update: out of memory",
        "phases": {
            "update": {"allocated": peak, "reserved": peak, "seconds": 2.0},
            "rollout": {"allocated": 2 * GIB, "reserved": 2 * GIB, "seconds": 1.0},
        },
        "allocated_bytes": peak,
        "reserved_bytes": peak,
        "device_bytes": peak + GIB,
        "host_bytes": host + PROCESS,
        "host_before_bytes": PROCESS,
        "seconds": 5.0,
        "code": "a",
    }


def cap(key, factor, ran):
    return {"kind": "cap", "key": key, "number": 3, "factor": factor, "ran": ran, "code": "a"}


def test_rows_are_what_was_predicted_and_measured_by_number():
    records = [predicted("b", number=2), predicted("a", number=1), predicted("c"), measured("a"), measured("b")]
    assert [row["predicted"]["key"] for row in joined(records)] == ["a", "b"]
    assert joined([measured("a")]) == []


def test_fitting_configs_that_ran_out_and_refused_ones_that_would_fit():
    assert needed_bytes(predicted("a", least=100)) == 103 + CONTEXT
    rows = joined(
        [
            predicted("a"),  # 10.3 GiB and the context
            measured("a", ran=False),
            predicted("b", number=1),
            measured("b"),
            predicted("c", number=2, least=50 * GIB),
            measured("c"),
        ]
    )
    found = safety(rows, 20 * GIB)
    assert (found["called_fitting"], found["ran_out"]) == (2, 1)
    assert found["ran_out_bound_percent"] == pytest.approx(100 * 0.95**0.5, abs=0.01)
    # The card that b would fill to 95 % has (10 GiB + context) / 0.95, more than it is said to need; c is refused.
    assert found["refused_though_fitting"] == 1
    assert found["refused_though_fitting_percent"] == 50.0


def test_caps_that_went_the_other_way():
    found = caps([cap("a", 1.03, True), cap("a", 0.97, False), cap("b", 1.03, False), cap("b", 0.97, False)])
    assert found == {"0.97": {"n": 2, "ran": 0, "wrong": []}, "1.03": {"n": 2, "ran": 1, "wrong": [3]}}


def test_the_summary_of_two_rows():
    records = [
        predicted("a"),
        predicted("b", number=1, model="Llama 8B", method="LoRA", trace=11 * GIB),
        measured("a"),
        measured("b", host=4 * GIB) | {"workers": 7},
        cap("a", 1.03, True),
        cap("a", 0.97, True),
    ]
    found = summary(records, 141 * GIB)
    by_name = {row["predictor"]: row for row in found["predictors"]}
    assert list(by_name) == ["trace", "closed form", "accelerate estimate-memory", "LLMem, as published"]
    assert by_name["trace"]["mean_percent"] == 5.0  # 0 and 10 %
    assert by_name["trace"]["seconds"] == 4.0
    assert by_name["closed form"]["bias_percent"] == 10.0
    assert by_name["accelerate estimate-memory"]["under_share_percent"] == 100.0
    assert by_name["LLMem, as published"]["worst_percent"] == 1.6
    assert set(found["subsets"]) == {"LoRA only", "full only", "llama only, to which nothing was fitted"}
    assert found["subsets"]["llama only, to which nothing was fitted"][0]["mean_percent"] == 10.0
    phases = {(row["predictor"], row["phase"]): row for row in found["phases"]}
    assert (phases["trace", "update"]["within"], phases["trace", "update"]["n"]) == (1, 2)
    assert phases["trace", "rollout"]["within"] == 2
    host = next(row for row in found["memory"] if row["memory"] == "host, trace")
    assert host["worst_percent"] == round(100 * (-2 * GIB / (4 * GIB + PROCESS)), 3)
    buffers = next(row for row in found["memory"] if row["memory"] == "host buffers, trace")
    assert (buffers["n"], buffers["worst_percent"]) == (2, -50.0)
    (time,) = found["time"]  # of the one that ran alone
    assert (time["phase"], time["n"], time["bias_percent"]) == ("update", 1, -25.0)
    verdicts = {row["target"]: row["met"] for row in found["targets"]}
    assert verdicts["trace, mean %"] is False
    assert verdicts["called fitting, ran out"] is True
    assert verdicts["caps on the wrong side"] is False
    assert found["code"] == {"predicted": ["a"], "measured": ["a"], "cap": ["a"]}
    assert [row["number"] for row in found["rows"]] == [0, 1]
    assert "source" not in tables(found)["allocated peak of a run"][-1]


def test_a_file_without_measurements_has_a_table_without_verdicts():
    found = summary([predicted("a")], 141 * GIB)
    assert found["rows"] == []
    assert {row["met"] for row in targets(found)} == {None}
    assert tables(found) == {}


def test_relative():
    assert relative(97, 100) == pytest.approx(-0.03, abs=1e-15)
