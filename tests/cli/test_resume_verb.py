"""`ullage resume` on a real run: what continues, what is refused, and that nothing is lost on the way."""

import json
import os

import pytest

from ullage.cli.main import main
from ullage.config.load import load_config
from ullage.telemetry.reader import read_metrics
from ullage.telemetry.run_directory import RunDirectory


def weights(run):
    return (run / "final" / "model.safetensors").read_bytes()


def steps(run):
    return [row["step"] for row in read_metrics(run)]


def kill(run):
    """Make the run look as `kill -9` in the middle of its last step leaves it."""
    (run / "exit.json").unlink()
    for path in (run / "final").iterdir():
        path.unlink()
    (run / "final").rmdir()


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_finished_run_has_nothing_to_do(run_copy, capsys):
    before = weights(run_copy), (run_copy / "exit.json").read_text(), (run_copy / "resolved.yaml").read_text()
    assert main(["resume", str(run_copy), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"run": str(run_copy), "code": 0}
    assert err.splitlines() == [
        f"nothing to do: {run_copy} is finished, step 4 of 4",
        f"  to train on: ullage resume {run_copy} trainer.total_training_steps=8",
    ]
    assert before == (weights(run_copy), (run_copy / "exit.json").read_text(), (run_copy / "resolved.yaml").read_text())
    assert not (run_copy / "lock").exists()


def test_a_lower_last_step_than_reached_is_nothing_to_do_too(run_copy, capsys):
    assert main(["resume", str(run_copy), "trainer.total_training_steps=3"]) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert steps(run_copy) == [0, 1, 2, 3, 4]


def test_a_finished_run_goes_on_to_a_later_step_by_its_name(run_copy, monkeypatch, capsys):
    monkeypatch.chdir(run_copy.parent.parent)
    before = weights(run_copy)
    rate = "actor_rollout_ref.actor.optim.lr"
    assert main(["resume", "small", "trainer.total_training_steps=6", f"{rate}=0.0005"]) == 0
    config = load_config(run_copy / "resolved.yaml").config
    assert config.trainer.total_training_steps == 6
    assert config.actor_rollout_ref.actor.optim.lr == 5e-4
    rows = read_metrics(run_copy)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["actor/learning_rate"] for row in rows[1:]] == [1e-3] * 4 + [5e-4] * 2
    assert weights(run_copy) != before
    events = (run_copy / "logs" / "events.log").read_text()
    said = capsys.readouterr().err
    for change in (f"{rate} = 0.0005 (was 0.001)", "trainer.total_training_steps = 6 (was 4)"):
        assert f"resumed with {change}\n" in events
        assert f"config: {change}\n" in said


def test_changes_that_would_break_the_state_are_refused_together(run_copy, capsys):
    before = (run_copy / "resolved.yaml").read_text()
    seed, data, dtype = "trainer.seed=7", "data.train_files=[other.jsonl]", "actor_rollout_ref.model.dtype=float64"
    assert main(["resume", str(run_copy), seed, data, dtype, "trainer.save_freq=1"]) == 78
    error = capsys.readouterr().err
    assert error.startswith("ullage: error: 3 key(s) cannot change in a run that goes on:\n")
    for named in ("trainer.seed = 7 (was 1)", "data.train_files = ['other.jsonl']", "model.dtype = 'float64'"):
        assert named in error
    assert "save_freq" not in error
    assert (run_copy / "resolved.yaml").read_text() == before
    assert (run_copy / "exit.json").exists()


def test_the_same_value_again_is_no_change(run_copy, capsys):
    assert main(["resume", str(run_copy), "trainer.seed=1"]) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_a_run_that_is_being_written_is_left_alone(run_copy, capsys):
    kill(run_copy)
    other = RunDirectory.open_existing(run_copy)
    other.reopen()
    try:
        assert main(["resume", str(run_copy)]) == 74
    finally:
        other.close()
    assert f"is being written by process {os.getpid()}" in capsys.readouterr().err
    assert not (run_copy / "final").exists()


def test_without_a_checkpoint_it_starts_from_the_beginning_and_says_so(finished, run_copy, capsys):
    kill(run_copy)
    for path in sorted((run_copy / "checkpoints").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert main(["resume", str(run_copy)]) == 0
    assert "from the beginning" in capsys.readouterr().err
    assert steps(run_copy) == [0, 1, 2, 3, 4]
    assert weights(run_copy) == weights(finished)


def test_a_damaged_newest_checkpoint_costs_its_steps_and_no_more(finished, run_copy, capsys):
    kill(run_copy)
    damage(run_copy / "checkpoints" / "step_4" / "optimizer.safetensors")
    assert main(["resume", str(run_copy)]) == 0
    error = capsys.readouterr().err
    assert f"damaged checkpoint: {run_copy / 'checkpoints' / 'step_4' / 'optimizer.safetensors'}" in error
    assert "step=3/4" in error
    assert weights(run_copy) == weights(finished)


def test_with_every_checkpoint_damaged_it_does_not_start_over(run_copy, capsys):
    kill(run_copy)
    for step in (2, 4):
        damage(run_copy / "checkpoints" / f"step_{step}" / "model" / "model.safetensors")
    assert main(["resume", str(run_copy)]) == 74
    assert "damaged" in capsys.readouterr().err
    assert not (run_copy / "final").exists()
    assert steps(run_copy) == [0, 1, 2, 3, 4]


def test_it_goes_back_to_the_step_that_was_asked_for(finished, run_copy, capsys):
    assert main(["resume", str(run_copy), "--step", "2"]) == 0
    error = capsys.readouterr().err
    assert "step=2/4" not in error
    assert "step=3/4" in error
    assert steps(run_copy) == [0, 1, 2, 3, 4]
    assert weights(run_copy) == weights(finished)


def test_a_step_that_was_asked_for_has_no_stand_in(run_copy, capsys):
    assert main(["resume", str(run_copy), "--step", "3"]) == 66
    assert capsys.readouterr().err.endswith("has no checkpoint of step 3\n  fix: there are: 2, 4\n")
    damage(run_copy / "checkpoints" / "step_2" / "state.json")
    assert main(["resume", str(run_copy), "--step", "2"]) == 74
    assert (run_copy / "exit.json").exists()


@pytest.mark.parametrize("name", ["nothing", "runs", "../nothing"])
def test_what_is_no_run_is_a_usage_error(run_copy, name, monkeypatch, capsys):
    monkeypatch.chdir(run_copy.parent.parent)
    assert main(["resume", name]) == 2
    assert f"no run {name}" in capsys.readouterr().err
