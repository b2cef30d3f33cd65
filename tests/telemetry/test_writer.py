"""What is written and what is forgotten when a run goes on from an earlier step."""

import json
import math

import pytest

from ullage.base.errors import WriteError
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.writer import MetricsWriter, SilentWriter, json_text


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path, "first")
    directory.create()
    yield directory
    directory.close()


def test_a_step_is_one_line_with_the_step_first(run):
    writer = MetricsWriter(run)
    writer.step(1, {"reward/mean": 0.1, "actor/loss": math.nan, "actor/grad_norm": math.inf})
    writer.step(2, {"reward/mean": 1})
    assert run.metrics.read_text() == (
        '{"step": 1, "reward/mean": 0.1, "actor/loss": null, "actor/grad_norm": null}\n'
        '{"step": 2, "reward/mean": 1.0}\n'
    )


def test_floats_come_back_bit_for_bit(run):
    value = 0.1 + 0.2
    MetricsWriter(run).step(1, {"reward/mean": value})
    assert json.loads(run.metrics.read_text())["reward/mean"].hex() == value.hex()


def test_memory_has_the_keys_of_the_contract(run):
    MetricsWriter(run).memory(
        3, "update", allocated_peak_bytes=10, reserved_peak_bytes=20, components={"weights": 4}, planned_bytes=12
    )
    assert json.loads(run.memory.read_text()) == {
        "step": 3,
        "phase": "update",
        "planned_bytes": 12,
        "allocated_peak_bytes": 10,
        "reserved_peak_bytes": 20,
        "components": {"weights": 4},
    }


def test_samples_hold_any_text_on_one_line_each(run):
    rows = [{"text": "a\nb\u2028c\ud800\x00", "reward": math.nan}, {"text": "日本", "reward": 1.0}]
    MetricsWriter(run).samples(4, rows)
    lines = run.samples_of(4).read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "a\nb\u2028c\ud800\x00", "reward": None}, rows[1]]


def test_truncate_forgets_later_steps_and_a_half_written_line(run):
    writer = MetricsWriter(run)
    for step in range(1, 6):
        writer.step(step, {"reward/mean": step / 3})
        writer.memory(step, "update", allocated_peak_bytes=step, reserved_peak_bytes=step, components={})
        writer.samples(step, [{"step": step}])
    for step in (0, 3, 5):
        writer.evaluation(step, [{"step": step}])
    writer.close()
    whole = run.metrics.read_bytes().splitlines(keepends=True)
    with run.metrics.open("a") as file:
        file.write('{"step": 3, "reward/mea')
    (run.samples / "step_note.jsonl").write_text("")
    writer.truncate_after(3)
    assert run.metrics.read_bytes() == b"".join(whole[:3])
    assert [json.loads(line)["step"] for line in run.memory.read_text().splitlines()] == [1, 2, 3]
    kept = sorted(path.name for path in run.samples.iterdir())
    assert kept == ["eval_0.jsonl", "eval_3.jsonl", "step_1.jsonl", "step_2.jsonl", "step_3.jsonl", "step_note.jsonl"]
    writer.step(4, {"reward/mean": 4 / 3})
    assert run.metrics.read_bytes() == b"".join(whole[:4])


def test_truncate_of_an_unwritten_run_does_nothing(run):
    MetricsWriter(run).truncate_after(0)
    assert not run.metrics.exists()


def test_exit_says_how_it_ended_and_never_fails(run):
    writer = MetricsWriter(run)
    writer.exit(75, "preempted", "update", 3, "ullage resume runs/first")
    assert json.loads(run.exit.read_text()) == {
        "code": 75,
        "reason": "preempted",
        "phase": "update",
        "step": 3,
        "resume_command": "ullage resume runs/first",
    }
    run.exit.unlink()
    run.exit.mkdir()  # a folder in its place cannot be replaced by a file
    writer.exit(1, "bug", None, 3, None)
    assert run.exit.is_dir()


def test_a_file_that_cannot_be_written_is_a_write_error(run):
    run.metrics.mkdir()
    with pytest.raises(WriteError, match="cannot append to") as caught:
        MetricsWriter(run).step(1, {})
    assert f"ullage resume {run.path}" in caught.value.remedy


def test_json_text_is_strict_in_depth():
    assert json_text({"a": [1.5, -math.inf, (math.nan,)], 2: None}) == '{"a": [1.5, null, [null]], "2": null}'


def test_the_silent_writer_leaves_the_folder_as_it_was(run):
    before = sorted(path.name for path in run.path.rglob("*"))
    writer = SilentWriter(run)
    writer.step(1, {"reward/mean": 1.0})
    writer.memory(1, "update", allocated_peak_bytes=1, reserved_peak_bytes=1, components={})
    writer.samples(1, [{}])
    writer.evaluation(1, [{}])
    writer.event("text")
    writer.exit(0, "finished", None, 1, None)
    assert sorted(path.name for path in run.path.rglob("*")) == before
