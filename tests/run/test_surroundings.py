"""When a run claims what its plan counts on, and what it says where that is gone."""

import json

import pytest

import ullage
from ullage.base.communicator import Solo
from ullage.config.tree import Config
from ullage.model.target import Target
from ullage.run.planned import Planned
from ullage.run.surroundings import claim_when_settled

GPU = Target("cuda", 0, (9, 0), 80 << 30)
BYTES = {"rollout": 3 << 30, "update": 5 << 30, "save": 4 << 30}
REWARD = "def score(prompt, response, target):\n    return float(len(response))\n"


@pytest.fixture
def claims(monkeypatch):
    """What is claimed, of a device that has it."""
    found = []

    def claim(target, planned):
        found.append((target.kind, planned))
        return True

    monkeypatch.setattr("ullage.run.surroundings.claim", claim)
    return found


class Recorder:
    def __init__(self):
        self.lines = []
        self.event = self.lines.append
        self.on_step = lambda: None


class Ranks(Solo):
    """Of three, all but this one are short of memory."""

    rank, size = 1, 3

    def gather(self, value):
        return [False, value, False]


def planned_with(sizes=BYTES, *, replay=True):
    return Planned(config=Config.model_validate({"memory": {"replay": replay}}), bytes=sizes)


def test_the_largest_phase_is_claimed_from_the_second_step_on(claims):
    recorder = Recorder()
    claim_when_settled(GPU, planned_with(), recorder, Solo())
    counts = []
    for _ in range(5):
        recorder.on_step()
        counts.append(len(claims))
    assert counts == [0, 1, 2, 3, 4]
    assert set(claims) == {("cuda", 5 << 30)}
    assert recorder.lines == []


def test_without_a_plan_nothing_is_claimed(claims):
    recorder = Recorder()
    claim_when_settled(GPU, planned_with({}), recorder, Solo())
    for _ in range(5):
        recorder.on_step()
    assert claims == []


@pytest.mark.parametrize(
    ("replay", "then"),
    [(True, "and phases that run out of it are repeated in smaller passes"), (False, "until a phase runs out of it")],
)
def test_memory_that_is_gone_is_a_line(monkeypatch, replay, then):
    tried = []
    monkeypatch.setattr("ullage.run.surroundings.claim", lambda target, planned: bool(tried.append(planned)))
    recorder = Recorder()
    claim_when_settled(GPU, planned_with(replay=replay), recorder, Solo())
    for _ in range(4):
        recorder.on_step()
    assert len(tried) == 1
    assert recorder.lines == [
        f"update was planned with 5.0 GiB of memory, not all of which can be had now: the run goes on, {then}"
    ]


def test_memory_that_goes_later_is_a_line_too(monkeypatch):
    answers = iter([True, True, False])
    monkeypatch.setattr("ullage.run.surroundings.claim", lambda target, planned: next(answers))
    recorder = Recorder()
    claim_when_settled(GPU, planned_with(), recorder, Solo())
    counts = []
    for _ in range(6):
        recorder.on_step()
        counts.append(len(recorder.lines))
    assert counts == [0, 0, 0, 1, 1, 1]


def test_what_other_ranks_lack_is_said_here(claims):
    recorder = Recorder()
    claim_when_settled(GPU, planned_with(), recorder, Ranks())
    recorder.on_step()
    recorder.on_step()
    assert [line.partition(" was planned ")[0] for line in recorder.lines] == ["rank 0: update", "rank 2: update"]


def test_a_run_and_one_that_goes_on_claim_from_their_second_step_on(monkeypatch, tiny_model, tmp_path):
    rows = [{"prompt": f"{number}=", "answer": "1"} for number in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    claims = []

    def claim(target, planned):
        written = [file.read_text().splitlines()[-1] for file in tmp_path.glob("runs/*/metrics.jsonl")]
        claims.append((max(json.loads(line)["step"] for line in written), planned))
        return True

    monkeypatch.setattr("ullage.run.surroundings.claim", claim)

    def train(steps, checkpoint=None):
        tree = {
            "data.train_files": [str(tmp_path / "rows.jsonl")],
            "data.train_batch_size": 2,
            "data.max_prompt_length": 8,
            "data.max_response_length": 2,
            "actor_rollout_ref.model.path": str(tiny_model),
            "actor_rollout_ref.rollout.n": 2,
            "reward.functions": [{"path": str(tmp_path / "reward.py")}],
            "reward.num_workers": 1,
            "trainer.default_local_dir": str(tmp_path / "runs"),
            "trainer.total_training_steps": steps,
        }
        with ullage.Trainer(tree) as trainer:
            if checkpoint:
                trainer.load_checkpoint(checkpoint)
            trainer.train()
            trainer.save_checkpoint(tmp_path / "kept")
            return trainer.run_directory

    def most(run):
        return max(json.loads((run / "plan.json").read_text())["planned_bytes"].values())

    first = train(3)
    second = train(6, tmp_path / "kept")
    assert claims == [(2, most(first)), (3, most(first)), (5, most(second)), (6, most(second))]
