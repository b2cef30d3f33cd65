"""`ullage train` plans first: what it writes down, what it refuses, and what a resumed run keeps to."""

import json
import re

import pytest
from runs import assert_same_run, samples_of

TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
SLOTS = "actor_rollout_ref.rollout.max_num_seqs"
PLAIN = {
    "memory.optimizer_state": "device",
    "memory.gradients": "weights",
    "memory.offload_roles": False,
    "memory.recompute": "none",
    "memory.activation_offload": "none",
    "memory.activation_share": 1.0,
    TOKENS: 8192,
    SLOTS: 64,
}

TITLE = "memory by phase: planned for sequences of full length, and the whole process as it was"


def train(ullage, task, runs, *, name="run", **options):
    changes = options.pop("changes", ())
    keys = {"trainer__total_training_steps": 2, **options}
    return ullage(*task.arguments(runs, name, **keys), changes=changes)


def plan_of(run):
    return json.loads((run / "plan.json").read_text())


def events_of(run):
    return [line.partition(": ")[2] for line in (run / "logs" / "events.log").read_text().splitlines()]


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def planned(ullage, task, tmp_path_factory):
    runs = tmp_path_factory.mktemp("planned")
    outcome = train(ullage, task, runs)
    assert outcome.code == 0, outcome.stderr
    return runs / "run"


def test_the_plan_says_what_every_open_key_is(planned):
    found = plan_of(planned)
    assert found["settings"] == PLAIN
    assert found["fits"] is True
    assert found["peak_bytes"] == max(phase["total_bytes"] for phase in found["phases"]) < found["capacity_bytes"]
    (load,) = [phase for phase in found["phases"] if phase["name"] == "load"]
    assert load["components"]["weights"] == 4 * found["parameters"]  # float32
    assert any("a CPU" in text for text in found["assumptions"])
    assert f"plan: fits: {found['binding_phase']} binds with" in "\n".join(events_of(planned))


def test_resolved_yaml_keeps_its_open_keys(planned):
    assert "recompute: auto" in (planned / "resolved.yaml").read_text()


def test_every_planned_phase_is_compared(planned):
    found, rows = plan_of(planned), lines_of(planned / "memory.jsonl")
    names = {"rollout", "logprob", "reference", "update", "save", "eval"}
    assert names <= {row["phase"] for row in rows}
    for row in rows:
        assert row["planned_bytes"] == found["planned_bytes"].get(row["phase"])
    measured = found["measured"]
    assert names <= measured.keys()
    for name in names:
        peak = max(row["allocated_peak_bytes"] for row in rows if row["phase"] == name)
        # A phase after the last line, such as the save of the last step, is in no line.
        assert peak <= measured[name]["allocated_peak_bytes"]
        error = 100 * (found["planned_bytes"][name] / measured[name]["allocated_peak_bytes"] - 1)
        assert measured[name]["error_percent"] == round(error, 2)
    told = events_of(planned)
    start = told.index(TITLE)
    assert [line.split()[0] for line in told[start + 1 :]] == list(measured)


def test_a_budget_that_nothing_fits(ullage, task, tmp_path):
    outcome = train(ullage, task, tmp_path, memory__budget="64MiB")
    assert outcome.code == 79
    cause, *rows, remedy = outcome.stderr.split("ullage: error: ")[1].splitlines()
    assert cause.startswith("optimizer_step does not fit: it needs at least ")
    assert cause.endswith(", there are 64.0 MiB (memory.budget = 64MiB)")
    assert rows[0] == "planned for it:"
    assert [row.split()[0] for row in rows[1:]][:3] == ["weights", "gradients", "optimizer"]
    least = re.fullmatch(r"  fix: set memory.budget=(\d+MiB) \(it may use more\): [\d.]+ MiB", remedy)[1]
    assert not (tmp_path / "run").exists()
    assert train(ullage, task, tmp_path, memory__budget=least).code == 0


def test_a_budget_beyond_what_is_there(ullage, task, tmp_path):
    assert train(ullage, task, tmp_path, memory__budget="99999GiB").code == 0
    (note,) = [line for line in events_of(tmp_path / "run") if "memory.budget" in line]
    assert note.startswith("memory.budget = 99999GiB: there are only ")
    assert plan_of(tmp_path / "run")["capacity_bytes"] < 99999 << 30


# --- resumed runs ---


def stop_after_one(ullage, task, runs):
    fault = "step=2,phase=update,kind=sigkill"
    assert ullage(*task.arguments(runs, "run", trainer__total_training_steps=2), fault=fault).code == -9
    return runs / "run"


def test_a_resumed_run_keeps_its_plan(ullage, task, tmp_path, planned):
    run = stop_after_one(ullage, task, tmp_path)
    before = plan_of(run)
    assert ullage("resume", run).code == 0
    assert not [line for line in events_of(run) if "planned again" in line]
    after = plan_of(run)
    assert {key: after[key] for key in before} == before
    assert_same_run(run, planned, step=2)


def test_a_resumed_run_obeys_the_plan_that_is_there(ullage, task, tmp_path, planned):
    run = stop_after_one(ullage, task, tmp_path)
    found = plan_of(run)
    found["settings"][TOKENS] = 22
    (run / "plan.json").write_text(json.dumps(found))
    fault = "step=2,phase=logprob,kind=oom,at=1,half=forward"
    assert ullage("resume", run, fault=fault).code == 0
    (told,) = [line for line in events_of(run) if "ran out of memory" in line]
    assert "11 instead of 22 tokens" in told
    assert samples_of(run) == samples_of(planned)


def test_another_config_is_planned_again(ullage, task, tmp_path):
    run = stop_after_one(ullage, task, tmp_path)
    assert ullage("resume", run, f"{TOKENS}=44").code == 0
    assert events_of(run).count("planned again: the config or the device has changed") == 1
    assert TOKENS not in plan_of(run)["settings"]
    # Nothing but the trainer's own section has changed: the plan holds.
    assert ullage("resume", run, "trainer.total_training_steps=3").code == 0
    assert events_of(run).count("planned again: the config or the device has changed") == 1


@pytest.mark.parametrize("change", [{"peak_bytes": 1 << 60}, {"settings": None}])
def test_a_plan_that_no_longer_holds_is_made_again(ullage, task, tmp_path, planned, change):
    run = stop_after_one(ullage, task, tmp_path)
    (run / "plan.json").write_text(json.dumps(plan_of(run) | change))
    assert ullage("resume", run).code == 0
    (told,) = [line for line in events_of(run) if line.startswith("planned again: ")]
    assert ("it needed" in told) == ("peak_bytes" in change)
    assert plan_of(run)["settings"] == PLAIN
    assert_same_run(run, planned, step=2)


# --- several ranks ---


def test_two_ranks_agree(ullage, task, tmp_path, planned):
    outcome = train(ullage, task, tmp_path, changes=["fork_ranks"], trainer__n_gpus_per_node=2)
    assert outcome.code == 0, outcome.stderr
    found = plan_of(tmp_path / "run")
    assert found["settings"] == PLAIN
    assert found["capacity_bytes"] == plan_of(planned)["capacity_bytes"] // 2  # one memory for both
    assert events_of(tmp_path / "run").count(TITLE) == 1
    assert samples_of(tmp_path / "run") == samples_of(planned)


def test_two_ranks_are_refused_once(ullage, task, tmp_path):
    outcome = train(ullage, task, tmp_path, changes=["fork_ranks"], trainer__n_gpus_per_node=2, memory__budget="64MiB")
    assert outcome.code == 79
    assert outcome.stderr.count("does not fit") == 1
    assert not (tmp_path / "run").exists()
