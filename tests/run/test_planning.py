"""Plans that runs make: on a GPU that is made up, on a CPU with little memory, and corrected by what was measured."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ullage.base.communicator import Solo
from ullage.base.errors import DoesNotFitError, ModelError
from ullage.config.settle import ACTOR_TOKENS, NUM_SLOTS, choices_of, open_keys, plain, with_key
from ullage.config.tree import Config
from ullage.model.target import Target
from ullage.planner.components import CONTEXT
from ullage.planner.corrections import Corrections
from ullage.planner.model_shape import find_shape
from ullage.planner.phases import Layout
from ullage.run import traced_plan
from ullage.run.comparison import compare
from ullage.run.machine import find_machine
from ullage.run.planned import Planned
from ullage.run.planning import find_model_shape, plan_together, prepare
from ullage.run.planning_cpu import plan_on_cpu
from ullage.run.predict import Prediction, predict_shallow
from ullage.run.trace_phases import traced_target
from ullage.telemetry.run_directory import RunDirectory

GIB = 1 << 30
GPU = Target("cuda", 0, (9, 0), 80 * GIB)
CPU = Target("cpu", 0, (0, 0), 8 * GIB)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ullage" / "corrections.json"


@pytest.fixture(autouse=True)
def h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - CONTEXT, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr("ullage.run.machine.host_memory", lambda: 512 * GIB)


def forms(config, model, target, *, ratio=1.0):
    """A trace that says what the closed forms say, or so many times that."""
    closed = {phase.name: phase.allocated_bytes for phase in Layout(find_shape(model), config).phases()}
    closed["update"] = max(closed["update"], closed.pop("optimizer_step"))
    return Prediction(phases={name: round(ratio * closed[name]) for name in ("rollout", "logprob", "update")})


@pytest.fixture(autouse=True)
def trace(monkeypatch):
    """Tracing takes seconds: most of these tests are about what is made of it."""
    monkeypatch.setattr(traced_plan, "predict_shallow", forms)
    monkeypatch.setattr(traced_plan, "predict", forms)


@pytest.fixture
def model(tmp_path):
    """A folder with the shape of Qwen2.5-1.5B and no weights, which no plan asks for."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_for(model, memory=None, **keys):
    return Config.model_validate({"actor_rollout_ref": {"model": {"path": str(model), **keys}}, "memory": memory or {}})


def directory_in(tmp_path):
    directory = RunDirectory(tmp_path, "run")
    directory.path.mkdir(exist_ok=True)
    return directory


def recorder_with(peaks):
    events = []
    return SimpleNamespace(peaks=peaks, event=events.append, events=events)


def test_a_plan_for_a_gpu(tmp_path, model):
    config, directory = config_for(model), directory_in(tmp_path)
    planned = plan_together(config, directory, GPU, Solo())
    found = json.loads(directory.plan.read_text())
    assert open_keys(planned.config) == []
    assert found["settings"].keys() == set(open_keys(config)) == found["chosen"].keys()
    assert {key: row["value"] for key, row in found["chosen"].items()} == found["settings"]
    assert planned.capacity_bytes == found["capacity_bytes"] == 80 * GIB
    phases = {phase["name"]: phase["components"] for phase in found["phases"]}
    assert planned.components == phases
    allocated = {
        name: sum(count for part, count in components.items() if part not in ("context", "slack", "graphs"))
        for name, components in phases.items()
    }
    assert planned.bytes["rollout"] == allocated["rollout"]
    assert planned.bytes["update"] == max(allocated["update"], allocated["optimizer_step"])
    (note,) = planned.notes
    assert note.startswith(f"plan: fits: {found['binding_phase']} binds with ")


def test_the_trace_of_what_was_chosen_is_what_is_planned(tmp_path, model, monkeypatch):
    monkeypatch.setattr(traced_plan, "predict_shallow", predict_shallow)
    small = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 1000}
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | small))
    values = {key: value for key, value in plain(config_for(model), "cuda").items() if key.startswith("memory.")}
    given = {key.removeprefix("memory."): value for key, value in values.items()}
    config, directory = config_for(model, given), directory_in(tmp_path)
    planned = plan_together(config, directory, GPU, Solo())
    found = json.loads(directory.plan.read_text())
    traced = predict_shallow(planned.config, str(model), traced_target((9, 0), 80 * GIB))
    assert found["traced"]["phases"] == traced.phases
    assert {name: planned.bytes[name] for name in ("rollout", "logprob", "update")} == {
        name: size for name, size in traced.phases.items() if name != "load"
    }
    update = next(phase for phase in found["phases"] if phase["name"] == "update")
    assert update["total_bytes"] == pytest.approx(1.03 * traced.phases["update"] + CONTEXT + 24 * 2**20, abs=4), (
        "with graphs"
    )
    assert found["traced"]["graphs_bytes"] == traced.graphs_bytes == 22 * 2**20


def test_a_trace_that_needs_more_than_the_forms_say_decides(tmp_path, model, monkeypatch):
    config, directory = config_for(model, {"budget": "24GiB"}), directory_in(tmp_path)
    by_forms = plan_together(config, directory, GPU, Solo())
    directory.plan.unlink()
    monkeypatch.setattr(traced_plan, "predict_shallow", partial(forms, ratio=1.4))
    monkeypatch.setattr(traced_plan, "predict", partial(forms, ratio=1.4))
    by_trace = plan_together(config, directory, GPU, Solo())
    assert by_trace.config != by_forms.config
    assert by_trace.bytes["update"] == forms(by_trace.config, str(model), None, ratio=1.4).phases["update"]
    assert 1.03 * by_trace.bytes["update"] + CONTEXT < 24 * GIB < 1.4 * 1.03 * by_forms.bytes["update"]


def test_a_model_that_cannot_be_traced_is_planned_by_forms(tmp_path, model, monkeypatch):
    def fail(*_):
        raise ModelError("no such layers", "give its folder")

    monkeypatch.setattr(traced_plan, "predict_shallow", fail)
    planned = plan_together(config_for(model), directory_in(tmp_path), GPU, Solo())
    assert planned.notes[0] == "planned by closed forms, not traced: no such layers"
    assert json.loads(directory_in(tmp_path).plan.read_text())["traced"] is None


def test_the_next_plan_is_corrected_by_exactly_what_was_measured(tmp_path, model, cache):
    config, directory = config_for(model, {"recompute": "full", "optimizer_state": "device"}), directory_in(tmp_path)
    first = plan_together(config, directory, GPU, Solo())
    peaks = {"update": round(1.25 * first.bytes["update"]), "rollout": round(0.5 * first.bytes["rollout"])}
    compare(first, recorder_with(peaks), directory, GPU)
    assert list(json.loads(cache.read_text()).values()) == [[{"rollout": 0.5, "update": 1.25}]]

    directory.plan.unlink()
    second = plan_together(config, directory, GPU, Solo())
    assert second.scale == {"update": 1.25, "optimizer_step": 1.25}
    again = plan_together(first.config, directory_in(tmp_path), GPU, Solo())  # the same settings, corrected
    assert again.bytes["update"] == round(1.25 * first.bytes["update"])
    assert again.bytes["rollout"] == first.bytes["rollout"]  # short answers say nothing about long ones
    before, after = (sum(made.components["update"].values()) for made in (first, again))
    allocated = before - sum(first.components["update"][name] for name in ("context", "slack", "graphs"))
    assert after - before == pytest.approx(0.25 * 1.03 * allocated, abs=2)  # with what the allocator needs beside it

    # A run under the corrected plan that measures the same leaves the correction as it is.
    compare(again, recorder_with(peaks), directory, GPU)
    assert json.loads(cache.read_text()).popitem()[1][-1] == {"rollout": 0.5, "update": 1.25}


def test_a_damaged_cache_is_told_and_ignored(tmp_path, model, cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("{")
    notes = prepare(config_for(model), tmp_path / "plan.json", GPU, 1)
    assert notes[0] == f"{cache} is damaged: planned without what earlier runs measured"
    assert len(notes) == 2
    assert json.loads((tmp_path / "plan.json").read_text())["scale"] == {}


def test_a_cache_that_cannot_be_written_ends_nothing(tmp_path, model, cache):
    directory = directory_in(tmp_path)
    planned = plan_together(config_for(model), directory, GPU, Solo())
    cache.parent.parent.write_text("a file")
    recorder = recorder_with({"update": 3 * GIB})
    compare(planned, recorder, directory, GPU)
    assert recorder.events[-1].startswith(f"not remembered for the next plan: cannot write {cache}")


def test_measured_beside_planned(tmp_path):
    directory = directory_in(tmp_path)
    directory.plan.write_text("{}")
    planned = Planned(config=Config(), bytes={"rollout": 3 << 20, "update": 6 << 20, "save": 1 << 20})
    recorder = recorder_with({"update": 8 << 20, "rollout": 3 << 20, "reward": 5})
    compare(planned, recorder, directory, CPU)
    assert recorder.events == [
        "memory by phase: planned for sequences of full length, and the whole process as it was",
        "  rollout          3.0 MiB    3.0 MiB",
        "  update           6.0 MiB    8.0 MiB",
    ]
    on_device = recorder_with({"update": 8 << 20})
    compare(planned, on_device, directory, GPU)
    assert on_device.events == [
        "memory by phase: planned for sequences of full length, measured, error of the plan",
        "  update           6.0 MiB    8.0 MiB   -25.0 %",
    ]
    assert json.loads(directory.plan.read_text())["measured"]["update"] == {
        "planned_bytes": 6 << 20, "allocated_peak_bytes": 8 << 20, "error_percent": -25.0
    }  # fmt: skip
    assert not Corrections().path.exists()  # a process on a CPU says nothing about tensors


def test_small_phases_are_not_remembered(tmp_path, cache):
    directory = directory_in(tmp_path)
    directory.plan.write_text("{}")
    planned = Planned(config=Config(), bytes={"rollout": GIB - 1, "update": 2 * GIB})
    compare(planned, recorder_with({"rollout": 2 * GIB, "update": 3 * GIB}), directory, GPU)
    assert list(json.loads(cache.read_text()).values()) == [[{"update": 1.5}]]


def test_a_plan_kept_and_a_smaller_machine(tmp_path, model):
    config, file = config_for(model), tmp_path / "plan.json"
    prepare(config, file, GPU, 1)
    text = file.read_text()
    assert prepare(config, file, GPU, 1) == []
    assert file.read_text() == text
    notes = prepare(config, file, Target("cuda", 0, (9, 0), 24 * GIB), 1)
    assert notes[0].startswith("planned again: it needed ")
    assert notes[0].endswith(", there are 24.0 GiB now")
    assert json.loads(file.read_text())["peak_bytes"] <= 24 * GIB


def test_the_budget_decides_what_is_chosen(tmp_path, model):
    settings = []
    for budget in ("auto", "12GiB"):
        file = tmp_path / f"{budget}.json"
        prepare(config_for(model, {"budget": budget}), file, GPU, 1)
        found = json.loads(file.read_text())
        settings.append(found["settings"])
    assert found["peak_bytes"] <= found["capacity_bytes"] == 12 * GIB
    assert settings[0] != settings[1]


def test_nothing_fits(tmp_path, model):
    file = tmp_path / "plan.json"
    with pytest.raises(DoesNotFitError) as caught:
        prepare(config_for(model, {"budget": "2GiB"}), file, GPU, 1)
    first, second, *rows = caught.value.cause.splitlines()
    assert " does not fit: it needs at least " in first
    assert first.endswith(", there are 2.0 GiB (memory.budget = 2GiB)")
    assert second == "planned for it:"
    weights = find_model_shape(config_for(model)).parameters * 2 / GIB  # in half precision
    assert rows[0].split() == ["weights", f"{weights:.1f}", "GiB"]
    budget = caught.value.remedy.split("set memory.budget=")[1].split(" ")[0]
    assert not file.exists()
    prepare(config_for(model, {"budget": budget}), file, GPU, 1)
    assert json.loads(file.read_text())["fits"]


def test_a_host_that_is_too_small(tmp_path, model, monkeypatch):
    monkeypatch.setattr("ullage.run.machine.host_memory", lambda: GIB)
    with pytest.raises(DoesNotFitError, match="the run does not fit: host memory needs"):
        prepare(config_for(model), tmp_path / "plan.json", GPU, 1)


@pytest.mark.parametrize(
    ("content", "why"), [('{"model_type": "gpt2"}', "gpt2"), ("{}", "hidden_size"), ("[]", "not a model's config")]
)
def test_a_model_without_a_known_shape_goes_on_with_plain_values(tmp_path, model, content, why):
    (model / "config.json").write_text(content)
    planned = plan_together(config_for(model), directory_in(tmp_path), GPU, Solo())
    assert why in planned.notes[-1]
    assert planned.notes[-1].startswith("not planned: ")
    assert choices_of(planned.config).recompute == "full"
    assert planned.bytes == {}
    assert plan_together(config_for(model), directory_in(tmp_path), GPU, Solo()).notes == ()


def test_formulas_that_fail_end_nothing(tmp_path, model, monkeypatch):
    monkeypatch.setattr("ullage.run.traced_plan.plan", lambda *given, **named: 1 // 0)
    monkeypatch.setattr("ullage.run.planning.plan", lambda *given, **named: 1 // 0)
    notes = prepare(config_for(model), tmp_path / "plan.json", GPU, 1)
    assert notes == ["not planned: ZeroDivisionError: integer division or modulo by zero"]


# --- CPUs ---


def on_cpu(capacity, **memory):
    config = config_for("qwen2.5-0.5b", memory)
    machine = find_machine(CPU, config, 1).machine
    machine = replace(machine, gpu=replace(machine.gpu, memory_bytes=capacity))
    return plan_on_cpu(find_shape("qwen2.5-0.5b"), config, machine)


def test_a_cpu_keeps_plain_values_as_long_as_they_fit():
    made = on_cpu(512 * GIB)
    assert choices_of(made.config).recompute == "none"
    (load,) = [phase for phase in made.phases if phase.name == "load"]
    assert load.components["weights"] == 4 * made.shape.parameters
    assert not any("buffers" in phase.components for phase in made.phases)
    assert (made.host, made.seconds) == ({}, {})


def test_a_cpu_with_less_memory_recomputes_first():
    most = on_cpu(512 * GIB).peak_bytes
    made = on_cpu(most - GIB)
    assert made.fits
    chosen = choices_of(made.config)
    assert (chosen.recompute, chosen.optimizer_state, chosen.slots) == ("full", "device", 64)
    assert made.chosen["memory.recompute"] == {"value": "full", "why": "with more it does not fit"}


def test_what_a_cpu_keeps_on_its_host_is_in_its_one_memory():
    moved = on_cpu(512 * GIB, optimizer_state="host")
    state = 8 * moved.shape.parameters
    assert all(phase.components["host"] >= state for phase in moved.phases)


@pytest.mark.parametrize(
    ("share", "budget", "goes_on"), [(0.9, "auto", True), (0.9, "1GiB", False), (0.05, "auto", False)]
)
def test_a_cpu_is_tried_as_long_as_the_weights_fit(tmp_path, monkeypatch, share, budget, goes_on):
    """Every key is given, so that nothing can be made smaller."""
    keys = {"recompute": "none", "budget": budget}
    config = with_key(with_key(config_for("qwen2.5-0.5b", keys), ACTOR_TOKENS, 8192), NUM_SLOTS, 64)
    least = on_cpu(512 * GIB, **keys).peak_bytes
    monkeypatch.setattr("ullage.run.machine.host_memory", lambda: int(share * least))
    monkeypatch.setattr("ullage.run.planning.find_model_shape", lambda config: find_shape("qwen2.5-0.5b"))
    file = tmp_path / "plan.json"
    if not goes_on:
        with pytest.raises(DoesNotFitError):
            prepare(config, file, CPU, 1)
        return
    (note,) = prepare(config, file, CPU, 1)
    assert note.startswith("plan: does not fit: update needs ")
    assert prepare(config, file, CPU, 1) == []  # it has been said


def test_a_cpu_that_nothing_fits_names_what_would():
    made = on_cpu(4 * GIB, recompute="none")
    assert not made.fits
    assert made.fixes == ()  # there is not more memory, and recomputing would not do
    made = on_cpu(512 * GIB, budget="4GiB")
    (fix,) = made.fixes
    assert on_cpu(512 * GIB, budget=fix.change.removeprefix("memory.budget=")).fits
