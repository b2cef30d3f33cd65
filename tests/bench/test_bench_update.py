"""The benchmarks run on a CPU in a small form, and count what they say they count."""

import json

import pytest
import torch

from ullage.bench.batches import PROMPT, log_normal_lengths
from ullage.bench.budget import budgets
from ullage.bench.shapes import multiplied_parameters, shape_config, training_flops
from ullage.bench.update import ACTIVATIONS, LEVERS, STATE, Workload, bench_config, compared
from ullage.cli.main import main
from ullage.config.settle import PATHS
from ullage.model.random_weights import random_module
from ullage.model.target import Target, find_target

CPU = Target("cpu", 0, (0, 0), 8 << 30)


def test_lengths_fill_the_tokens_and_have_the_mean():
    lengths = log_normal_lengths(4_000_000, mean=1024, cap=4096, seed=3)
    assert 3_996_000 < sum(lengths) <= 4_000_000
    assert max(lengths) <= 4096
    assert sum(lengths) / len(lengths) == pytest.approx(1024, rel=0.03)  # the cap takes a little
    assert lengths[:50] == log_normal_lengths(400_000, mean=1024, cap=4096, seed=3)[:50]


def test_flops_by_hand():
    # tiny: hidden 64, mlp 128, 2 layers, 4 heads of 16, 2 kv heads, vocabulary 512, tied.
    module = random_module(shape_config("tiny"), torch.float32, CPU.device)
    attention = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64
    layer = attention + 3 * 64 * 128 + 2 * 64
    assert multiplied_parameters(module) == (2 * layer + 64, 512 * 64)
    squares = 100**2 + 50**2
    want = 6 * ((2 * layer + 64) * 150 + 512 * 64 * 118) + 12 * 2 * 4 * 16 * squares / 2
    assert training_flops(module, [100, 50], 150 - 2 * PROMPT) == want


@pytest.mark.parametrize("settings", [*LEVERS.values(), *STATE.values(), *ACTIVATIONS.values()], ids=str)
def test_every_row_is_a_config(settings):
    bench_config(Workload(shape="tiny", tokens=4096, micro_batch=4096), settings)


def test_a_row_is_compared_with_the_first():
    first = {"tokens": 16384, "update_s": 2.0, "optimizer_s": 0.5, "peak_gib": 10.0, "step_peak_gib": 12.0}
    found = {"tokens": 16384, "update_s": 2.5, "optimizer_s": 0.5, "peak_gib": 9.0, "step_peak_gib": 7.0}
    assert compared(found, first)["saved_gib"] == 3.0
    assert compared(found, first)["time_lost_percent"] == 20.0
    assert compared(found, first)["time_lost_percent_at"][32768] == 22.2  # 5.5 against 4.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures a real model there, for minutes")
def test_a_small_benchmark_is_written_down(tmp_path, capfd):
    out = tmp_path / "results" / "update.json"
    assert main(["bench", "update", "--only", "head", "fit", "--out", str(out), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    written = json.loads(out.read_text())
    assert written["command"] == "ullage bench update --only head fit"
    assert {"date", "hardware", "versions", "head", "fit"} <= written.keys()
    assert printed == {"head": written["head"], "fit": written["fit"]}
    (step,) = written["fit"]
    assert step["fits"] is True
    assert set(step["seconds"]) == {"rollout", "logprob", "update"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures real models there, for minutes")
def test_a_budget_alone_gives_a_step_that_runs():
    (row,) = budgets(find_target("cpu", 0), ["tiny"])
    assert row["fits"] is True
    assert set(row["chosen"]) == set(PATHS)
    # A plan has room for log-probs of the old policy, for which this step has no use.
    assert set(row["planned_gib"]) == {"load", "rollout", "logprob", "update"}
    assert set(row["peak_gib"]) == {"load", "rollout", "update"}
