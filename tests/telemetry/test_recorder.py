"""Times, peaks and metrics of steps, on a clock and a probe that the test moves by hand."""

import json
import re
from contextlib import suppress

import pytest

from ullage.telemetry.recorder import Recorder
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.writer import MetricsWriter


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Probe:
    """Returns the peaks it is given since the phase began."""

    def __init__(self):
        self.level = 0
        self.peak = None

    def use(self, level):
        self.level = level
        if self.peak is not None:
            self.peak = max(self.peak, level)

    def start_phase(self):
        assert self.peak is None, "started twice"
        self.peak = self.level

    def end_phase(self):
        peak, self.peak = self.peak, None
        return peak, peak + 1, {"weights": peak // 2}


class Watcher:
    def __init__(self):
        self.calls = []

    def start(self, info):
        self.calls.append(("start", info))

    def phase(self, name, done, total, note):
        self.calls.append(("phase", name, done, total, note))

    def step(self, step, metrics):
        self.calls.append(("step", step, dict(metrics)))

    def event(self, text):
        self.calls.append(("event", text))

    def stop(self):
        self.calls.append(("stop",))


class Broken(Watcher):
    def phase(self, name, done, total, note):
        raise OSError("terminal gone")


@pytest.fixture
def parts(tmp_path):
    directory = RunDirectory(tmp_path, "first")
    directory.create()
    clock, probe, watcher = Clock(), Probe(), Watcher()
    recorder = Recorder(MetricsWriter(directory), [watcher], probe, clock)
    yield directory, clock, probe, watcher, recorder
    recorder.stop()
    directory.close()


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_has_its_metrics_times_and_peaks(parts):
    directory, clock, probe, watcher, recorder = parts
    clock.now += 50  # loading: not part of the step
    with recorder.step(1) as record:
        with recorder.phase("rollout"):
            probe.use(1000)
            probe.use(200)
            clock.now += 4
            recorder.progress(3, 8, "tokens")
        clock.now += 1
        for loss in (1.0, 3.0):
            with recorder.phase("update"):
                probe.use(600 if loss == 1.0 else 500)
                clock.now += 2
            record({"actor/loss": loss, "actor/learning_rate": loss})
        record({"reward/mean": 0.5})
    expected = {
        "actor/loss": 2.0,
        "actor/learning_rate": 3.0,
        "reward/mean": 0.5,
        "time/step": 9.0,
        "time/rollout": 4.0,
        "time/update": 4.0,
        "memory/rollout_peak_bytes": 1000.0,
        "memory/update_peak_bytes": 600.0,
    }
    assert lines(directory.metrics) == [{"step": 1, **expected}]
    assert lines(directory.memory) == [
        {
            "step": 1,
            "phase": phase,
            "planned_bytes": None,
            "allocated_peak_bytes": peak,
            "reserved_peak_bytes": peak + 1,
            "components": {"weights": peak // 2},
        }
        for phase, peak in (("rollout", 1000), ("update", 600))
    ]
    assert watcher.calls == [
        ("phase", "rollout", 0, 0, ""),
        ("phase", "rollout", 3, 8, "tokens"),
        ("phase", "update", 0, 0, ""),
        ("phase", "update", 0, 0, ""),
        ("step", 1, expected),
    ]


def test_a_phase_inside_another_pauses_it(parts):
    directory, clock, probe, _, recorder = parts
    with recorder.step(1):
        with recorder.phase("rollout"):
            probe.use(100)
            clock.now += 1
            with recorder.phase("reward"):
                assert recorder.current_phase == "reward"
                probe.use(700)
                clock.now += 10
                probe.use(50)
            assert recorder.current_phase == "rollout"
            clock.now += 2
        assert recorder.current_phase is None
    row = lines(directory.metrics)[0]
    assert (row["time/rollout"], row["time/reward"], row["time/step"]) == (3.0, 10.0, 13.0)
    assert (row["memory/rollout_peak_bytes"], row["memory/reward_peak_bytes"]) == (100.0, 700.0)


def test_what_happens_between_steps_counts_for_the_later_one(parts):
    directory, clock, _, _, recorder = parts
    for step in (1, 2):
        with recorder.step(step), recorder.phase("update"):
            clock.now += 1
        with recorder.phase("save"):
            clock.now += 3
    rows = lines(directory.metrics)
    assert "time/save" not in rows[0]
    assert [row["time/step"] for row in rows] == [1.0, 4.0]
    assert (rows[1]["time/save"], rows[1]["time/update"]) == (3.0, 1.0)


def test_an_evaluation_before_the_first_step_has_its_own_line(parts):
    directory, clock, _, watcher, recorder = parts
    with recorder.phase("evaluate"):
        clock.now += 5
        recorder.evaluation(0, {"eval/sums/mean@4": 0.25})
    with recorder.step(1):
        recorder.evaluation(1, {"eval/sums/mean@4": 0.5})
        clock.now += 1
    rows = lines(directory.metrics)
    assert rows[0] == {"step": 0, "eval/sums/mean@4": 0.25, "time/evaluate": 5.0, "memory/evaluate_peak_bytes": 0.0}
    assert rows[1] == {"step": 1, "eval/sums/mean@4": 0.5, "time/step": 1.0}
    assert [call[1] for call in watcher.calls if call[0] == "step"] == [0, 1]


def test_a_failed_step_leaves_no_line_and_says_where_it_was(parts):
    directory, clock, _, _, recorder = parts

    def fail():
        with recorder.step(4) as record, recorder.phase("update"):
            record({"reward/mean": 1.0})
            clock.now += 1
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    assert not directory.metrics.exists()
    assert (recorder.current_phase, recorder.current_step) == ("update", 4)
    with recorder.step(5), recorder.phase("update"):
        clock.now += 2
    row = lines(directory.metrics)[0]
    assert row["time/update"] == 2.0
    assert "reward/mean" not in row


def test_a_phase_tried_again_after_an_error_is_closed_properly(parts):
    directory, clock, _, _, recorder = parts
    with recorder.step(1):
        for attempt in range(2):
            try:
                with recorder.phase("update"):
                    clock.now += 1
                    if attempt == 0:
                        raise MemoryError
            except MemoryError:
                continue
        clock.now += 7
    row = lines(directory.metrics)[0]
    assert (row["time/update"], row["time/step"]) == (2.0, 9.0)
    assert recorder.current_phase is None


def test_what_was_planned_is_beside_what_was_measured(parts):
    directory, _, probe, _, recorder = parts
    recorder.planned = {"update": 700}
    for step, level in ((1, 800), (2, 300)):
        with recorder.step(step):
            for phase in ("rollout", "update"):
                with recorder.phase(phase):
                    probe.use(level)
    assert [row["planned_bytes"] for row in lines(directory.memory)] == [None, 700, None, 700]
    with suppress(MemoryError), recorder.step(3), recorder.phase("update"):
        probe.use(900)
        raise MemoryError
    assert recorder.peaks == {"rollout": 800, "update": 900}


def test_who_listens_hears_of_steps_that_ended_well(parts):
    directory, _, _, _, recorder = parts
    heard = []
    recorder.on_step = lambda: heard.append((recorder.current_phase, len(lines(directory.metrics))))
    recorder.evaluation(0, {"eval/mean": 0.5})  # a line, but no step
    for step in (1, 2, 3):
        with suppress(MemoryError), recorder.step(step), recorder.phase("update"):
            if step == 2:
                raise MemoryError
    assert heard == [(None, 2), (None, 3)]


def test_a_broken_view_is_dropped_and_the_others_go_on(parts):
    directory, _, _, watcher, recorder = parts
    broken = Broken()
    recorder.add_view(broken)
    with recorder.step(1), recorder.phase("update"):
        pass
    recorder.event("still here")
    assert broken.calls == []
    assert watcher.calls[-1] == ("event", "still here")
    assert "Broken stopped: OSError: terminal gone" in directory.events.read_text()


def test_events_are_kept_on_one_clean_line_each(parts):
    directory, _, _, _, recorder = parts
    recorder.event("two\nlines \x1b[31mred\x1b[0m")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d step 0: two lines red\n", directory.events.read_text())
