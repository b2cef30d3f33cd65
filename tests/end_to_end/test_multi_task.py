"""Two tasks in one run: shares of the batches, rewards and curves of each, a curriculum, and exact resumption."""

import json
from collections import Counter

import pytest
from runs import assert_same_run, metrics_of, samples_of, write_lines

REWARDS = """
def digit(prompt, response, target):
    assert target == "digit", target
    return float(response[:1].isdigit())


def letters(prompt, response, target):
    assert target == "letters", target
    return sum(character.isalpha() for character in response) / 3
"""
STEPS = 6


def two_tasks(folder, **changes):
    """Three quarters of each batch are sums, though there are as many words: eight of each, batches of four."""
    (folder / "rewards.py").write_text(REWARDS)
    for name, target in (("sums", "digit"), ("words", "letters")):
        rows = [{"prompt": f"{number}+{number}=", "answer": target} for number in range(8)]
        write_lines(folder / f"{name}.jsonl", rows)
    held_out = [
        {"prompt": "9+9=", "answer": target, "data_source": source}
        for source, target in (("sums", "digit"), ("words", "letters"))
    ]
    path = str(folder / "rewards.py")
    functions = [
        {"path": path, "name": "digit", "sources": ["sums"], "weight": 2.0},
        {"path": path, "name": "letters", "sources": ["words"]},
    ]
    return {
        "data__train_files": f"[{folder / 'sums.jsonl'}, {folder / 'words.jsonl'}]",
        "data__val_files": write_lines(folder / "held_out.jsonl", held_out),
        "data__mixing_weights": "{sums: 3, words: 1}",
        "data__curriculum": "true",
        "actor_rollout_ref__rollout__ignore_eos": "true",
        "reward": None,
        "reward__functions": json.dumps(functions),
        "trainer__total_training_steps": STEPS,
        "trainer__test_freq": 3,
        **changes,
    }


def prompts_of(run):
    """By step, the (source, prompt id) of each place of the batch."""
    steps = []
    for step in range(1, STEPS + 1):
        rows = [json.loads(line) for line in samples_of(run)[f"step_{step}.jsonl"].splitlines()]
        assert len(rows) == 16
        steps.append([(row["source"], row["prompt_id"]) for row in rows if row["sample"] == 0])
    return steps


@pytest.fixture(scope="module")
def whole(ullage, task, tmp_path_factory):
    runs = tmp_path_factory.mktemp("multi-task")
    outcome = ullage(*task.arguments(runs, "whole", **two_tasks(runs)))
    assert outcome.code == 0, outcome.stderr
    assert "digit in rewards.py, plain signature (prompt, response, target), weight 2, for sums" in outcome.stderr
    return runs / "whole"


def test_every_batch_holds_the_shares(whole):
    for batch in prompts_of(whole):
        assert Counter(source for source, _ in batch) == {"sums": 3, "words": 1}
        assert len(set(batch)) == 4


def test_each_task_has_its_rewards_and_curves(whole):
    for row in metrics_of(whole)[1:]:
        lines = samples_of(whole)[f"step_{row['step']}.jsonl"].splitlines()
        samples = [json.loads(line) for line in lines]
        assert {(sample["source"], *sample["reward_parts"]) for sample in samples} == {
            ("sums", "digit"), ("words", "letters")
        }  # fmt: skip
        for source, function, weight in (("sums", "digit", 2), ("words", "letters", 1)):
            own = [sample["reward"] for sample in samples if sample["source"] == source]
            assert row[f"reward/{source}/mean"] == pytest.approx(sum(own) / len(own), abs=1e-12)
            assert row[f"reward/{source}/{function}"] == row[f"reward/{function}"]
            assert row[f"reward/{function}"] == pytest.approx(row[f"reward/{source}/mean"] / weight, abs=1e-12)
            assert row[f"response/{source}/length_mean"] == 3.0
            assert 0 <= row[f"group/{source}/zero_std_fraction"] <= 1
        mean = 0.75 * row["reward/sums/mean"] + 0.25 * row["reward/words/mean"]
        assert row["reward/mean"] == pytest.approx(mean, abs=1e-12)
        zero = 0.75 * row["group/sums/zero_std_fraction"] + 0.25 * row["group/words/zero_std_fraction"]
        assert row["group/zero_std_fraction"] == zero


def test_full_marks_are_those_of_each_task(whole):
    """A sum passes with 2 and a word with 1."""
    for row in (row for row in metrics_of(whole) if "eval/sums/pass@1" in row):
        rows = [json.loads(line) for line in samples_of(whole)[f"eval_{row['step']}.jsonl"].splitlines()]
        for source, marks in (("sums", 2.0), ("words", 1.0)):
            own = [sample["reward"] for sample in rows if sample["source"] == source]
            assert row[f"eval/{source}/pass@1"] == sum(reward == marks for reward in own) / 2


def test_the_checkpoint_knows_how_often_each_prompt_was_solved(whole):
    """The rates of the samples that the run wrote down: the last ones of each prompt."""
    rates = {}
    for step in range(1, STEPS + 1):
        passed = {}
        for line in samples_of(whole)[f"step_{step}.jsonl"].splitlines():
            sample = json.loads(line)
            marks = {"sums": 2.0, "words": 1.0}[sample["source"]]
            passed.setdefault(sample["prompt_id"], []).append(sample["reward"] == marks)
        rates |= {prompt: sum(own) / 4 for prompt, own in passed.items()}
    saved = json.loads((whole / "checkpoints" / f"step_{STEPS}" / "state.json").read_text())
    state = saved["sampler"]
    assert state["drawn"] == {"sums": 18, "words": 6}
    sums, words = state["parts"]["sums"], state["parts"]["words"]
    assert sums["rates"] == [rates.get(row) for row in range(8)]
    assert words["rates"] == [rates.get(row) for row in range(8, 16)]
    assert 8 * sums["epoch"] + sums["cursor"] > 18  # some were passed over
    assert 8 * words["epoch"] + words["cursor"] == 6  # the first epoch takes all


@pytest.mark.parametrize(("step", "phase"), [(2, "reward"), (5, "update")])
def test_a_killed_run_continues_with_the_same_batches(ullage, task, tmp_path, whole, step, phase):
    """What a discarded step had drawn and learned is forgotten; eight rows of sums are three steps, so 5 is beyond."""
    keys = two_tasks(tmp_path)
    killed = ullage(*task.arguments(tmp_path, "killed", **keys), fault=f"step={step},phase={phase},kind=sigkill")
    assert killed.code == -9, killed.stderr
    resumed = ullage("resume", tmp_path / "killed")
    assert resumed.code == 0, resumed.stderr
    assert_same_run(tmp_path / "killed", whole, step=STEPS)


@pytest.mark.invariant
def test_two_ranks_learn_and_draw_as_one(ullage, task, tmp_path, whole):
    arguments = task.arguments(tmp_path, "two", **two_tasks(tmp_path, trainer__n_gpus_per_node=2))
    outcome = ullage(*arguments, changes=["fork_ranks"])
    assert outcome.code == 0, outcome.stderr
    assert samples_of(tmp_path / "two") == samples_of(whole)
    for row, expected in zip(metrics_of(tmp_path / "two"), metrics_of(whole), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_weights_and_curriculum_belong_to_the_run(ullage, task, tmp_path):
    keys = two_tasks(tmp_path, trainer__total_training_steps=1)
    assert ullage(*task.arguments(tmp_path, "run", **keys)).code == 0
    resumed = ullage("resume", tmp_path / "run", "data.mixing_weights={sums: 1, words: 1}", "data.curriculum=false")
    assert resumed.code == 78
    assert "data.mixing_weights = {'sums': 1.0, 'words': 1.0} (was {'sums': 3.0, 'words': 1.0})" in resumed.stderr
    assert "data.curriculum = False (was True)" in resumed.stderr


@pytest.mark.parametrize(
    ("changes", "cause", "remedy"),
    [
        (
            {"data__mixing_weights": "{sums: 3, word: 1}"},
            "data.mixing_weights.word: no training prompt is of this source",
            "did you mean 'words'? The data has sums, words",
        ),
        (
            {"reward__functions": "[{name: format, sources: [sums]}]"},
            "no reward function scores the source(s) words",
            "name each in the sources of one of reward.functions",
        ),
    ],
)
def test_sources_that_do_not_match(ullage, task, tmp_path, changes, cause, remedy):
    runs = tmp_path / "runs"
    outcome = ullage(*task.arguments(runs, "bad", **two_tasks(tmp_path, **changes)))
    assert outcome.code == 78, outcome.stderr
    assert f"ullage: error: {cause}\n  fix: {remedy}" in outcome.stderr
    assert not list(runs.iterdir())
