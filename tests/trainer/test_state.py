"""What a run remembers, and which checkpoints it keeps."""

import json
from contextlib import nullcontext

import pytest
import torch

from ullage.base.communicator import Solo
from ullage.base.errors import DataError, WriteError
from ullage.data.sampler import Sampler
from ullage.telemetry.run_directory import RunDirectory
from ullage.trainer.state import Evaluated, Keeper


class FakeOptimizer:
    def __init__(self):
        self.moment = torch.zeros(2)

    def tensors(self):
        return {"moment": self.moment}

    def restore(self, tensors):
        self.moment.copy_(tensors["moment"])


class FakeModel:
    adapters = None
    content = "weights"
    fails = False

    def save(self, folder):
        folder.mkdir()
        (folder / "model.txt").write_text(self.content)
        if self.fails:
            raise OSError(28, "No space left on device")

    save_merged = save


class FakeActor:
    def __init__(self):
        self.optimizer = FakeOptimizer()
        self.model = FakeModel()
        self.nonfinite_steps = 0


class FakeAlgorithm:
    coefficient = 0.5

    def state(self):
        return {"coefficient": self.coefficient}

    def restore(self, state):
        self.coefficient = state["coefficient"]


class FakeRecorder:
    def phase(self, name):
        return nullcontext()

    def event(self, text):
        raise AssertionError(text)


def make_keeper(tmp_path, *, keep=2, rows=8, facts=None):
    directory = RunDirectory(tmp_path, "run")
    if not directory.path.exists():
        directory.create()
    actor, sampler = FakeActor(), Sampler(rows, 2, seed=1, shuffle=True)
    facts = facts or {"data": "a"}
    return Keeper(directory, actor, sampler, FakeRecorder(), Solo(), algorithm=FakeAlgorithm(), keep=keep, facts=facts)


def take_step(keeper, step, score=None):
    keeper.sampler.next_batch()
    keeper.actor.optimizer.moment += 1
    keeper.advance(step)
    if score is not None:
        keeper.consider(step, score)


def folders(keeper):
    return sorted(path.name for path in keeper.directory.checkpoints.glob("step_*"))


def test_a_restored_keeper_knows_everything(tmp_path):
    keeper = make_keeper(tmp_path)
    take_step(keeper, 1)
    take_step(keeper, 2, score=0.5)
    keeper.actor.nonfinite_steps = 1
    keeper.algorithm.coefficient = 0.75
    torch.manual_seed(7)
    keeper.save()
    following, number = keeper.sampler.next_batch(), torch.rand(())

    restored = make_keeper(tmp_path)
    restored.restore(keeper.directory.checkpoint_of(2))
    assert (restored.step, restored.evaluated, restored.best) == (2, Evaluated(2, 0.5), Evaluated(2, 0.5))
    assert restored.actor.nonfinite_steps == 1
    assert restored.algorithm.coefficient == 0.75
    assert restored.actor.optimizer.moment.tolist() == [2, 2]
    assert restored.sampler.next_batch() == following
    assert torch.rand(()) == number


def test_a_step_that_was_begun_is_forgotten(tmp_path):
    keeper = make_keeper(tmp_path)
    take_step(keeper, 1)
    drawn = keeper.sampler.next_batch()
    keeper.rewind()
    assert keeper.sampler.next_batch() == drawn


def test_a_save_in_the_middle_of_a_step_is_of_the_last_complete_one(tmp_path):
    keeper = make_keeper(tmp_path)
    take_step(keeper, 1)
    keeper.sampler.next_batch()
    keeper.save()
    state = json.loads((keeper.directory.checkpoint_of(1) / "state.json").read_text())
    assert (state["step"], state["sampler"]["cursor"]) == (1, 2)


def test_nothing_new_is_not_written_again(tmp_path):
    keeper = make_keeper(tmp_path)
    take_step(keeper, 1)
    keeper.save()
    manifest = keeper.directory.checkpoint_of(1) / "manifest.json"
    before = manifest.stat().st_ino
    keeper.save()
    restored = make_keeper(tmp_path)
    restored.restore(keeper.directory.checkpoint_of(1))
    restored.save()
    assert manifest.stat().st_ino == before
    restored.consider(1, 0.5)  # evaluated meanwhile: that is new
    restored.save()
    assert json.loads((manifest.parent / "state.json").read_text())["evaluated"] == [1, 0.5]


def test_the_best_checkpoint_outlives_newer_ones(tmp_path):
    keeper = make_keeper(tmp_path)
    for step, score in enumerate((0.1, 0.9, 0.3, 0.9, 0.4, 0.2), start=1):
        take_step(keeper, step, score)
        keeper.save()
    assert keeper.best == Evaluated(2, 0.9)  # the first of equals
    assert folders(keeper) == ["step_2", "step_5", "step_6"]


def test_a_better_step_that_was_not_saved_is_no_best(tmp_path):
    """Otherwise the best checkpoint there is would be removed for one that there is not."""
    keeper = make_keeper(tmp_path, keep=1)
    take_step(keeper, 1, score=0.5)
    keeper.save()
    take_step(keeper, 2, score=0.9)
    for step in (3, 4):
        take_step(keeper, step)
        keeper.save()
    assert keeper.best == Evaluated(1, 0.5)
    assert folders(keeper) == ["step_1", "step_4"]


def test_measurements_before_the_first_evaluation_belong_to_no_state(tmp_path):
    keeper = make_keeper(tmp_path)
    assert keeper.recorded_until == -1
    keeper.consider(0, 0.5)
    assert keeper.recorded_until == 0
    keeper.save()
    assert keeper.best is None  # the untrained model is where the run came from
    take_step(keeper, 1)
    assert keeper.recorded_until == 1


def test_other_data_cannot_continue(tmp_path):
    keeper = make_keeper(tmp_path)
    take_step(keeper, 1)
    keeper.save()
    with pytest.raises(DataError, match="data changed since step_1 was saved: a then, b now"):
        make_keeper(tmp_path, facts={"data": "b"}).restore(keeper.directory.checkpoint_of(1))


def test_the_exported_model_is_whole_or_the_old_one(tmp_path):
    keeper = make_keeper(tmp_path)
    keeper.export()
    assert (keeper.directory.final / "model.txt").read_text() == "weights"
    keeper.actor.model.content = "newer"
    keeper.actor.model.fails = True
    with pytest.raises(WriteError, match="No space left on device") as caught:
        keeper.export()
    assert caught.value.remedy == f"free some disk space, then finish with: ullage resume {keeper.directory.path}"
    assert (keeper.directory.final / "model.txt").read_text() == "weights"
    assert not (keeper.directory.path / ".final.tmp").exists()
    keeper.actor.model.fails = False
    keeper.export()
    assert (keeper.directory.final / "model.txt").read_text() == "newer"
