"""Evaluation: hand-computed scores per source, majority votes, unscored samples, the same seeds every time."""

import json

import pytest

from ullage.base.communicator import Solo
from ullage.config.tree import Config
from ullage.data.prompts import Prompt
from ullage.rewards.pool import Score
from ullage.rollout.sampling import Sample
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.evaluate import Evaluator, draws, metrics_of


class FixedGenerator:
    """Answers every prompt with the rewards it is given."""

    def __init__(self, rewards):
        self.rewards = rewards
        self.seeds = []

    def run(self, prompts, seeds, sampling, phases):
        self.seeds.append(seeds)
        samples, scores = [], []
        for group, prompt in enumerate(prompts):
            for index, reward in enumerate(self.rewards[prompt.id]):
                samples.append(Sample(group=group, index=index, token_ids=(1,), logprobs=(0.0,), finish_reason="stop"))
                scores.append(Score(reward, {}, None if reward is not None else "timeout"))
        return samples, scores, [f"text {sample.index}" for sample in samples]


ONE = {"easy": 1.0, "hard": 1.0, "sums": 1.0, "told": 1.0, "mixed": 1.0, "failed": 1.0}


def make_evaluator(tmp_path, rewards, *, full_marks=ONE):
    directory = RunDirectory(tmp_path, "run")
    directory.create()
    config = Config.model_validate({"actor_rollout_ref": {"rollout": {"val_kwargs": {"n": 4}}}})
    sources = ["easy", "easy", "hard"]
    prompts = [
        Prompt(id=row, token_ids=(5,), prompt=f"question {row}", target="1", source=source, extra={})
        for row, source in enumerate(sources)
    ]
    generator = FixedGenerator(rewards)
    evaluator = Evaluator(config, prompts, generator, Solo(), MetricsWriter(directory), full_marks=full_marks)
    return evaluator, generator, directory


def test_scores_by_source(tmp_path):
    rewards = {0: [1.0, 0.0, 0.0, 0.0], 1: [1.0, 1.0, 0.0, 0.0], 2: [0.5, 0.0, None, 0.0]}
    evaluator, _, directory = make_evaluator(tmp_path, rewards)
    evaluation = evaluator.evaluate(7)
    assert evaluation.metrics == pytest.approx(
        {
            "eval/easy/mean@4": 0.375,
            "eval/easy/pass@1": 0.375,
            "eval/easy/pass@2": (0.5 + 5 / 6) / 2,
            "eval/easy/pass@4": 1.0,
            "eval/easy/best@1": 0.375,
            "eval/easy/best@2": (0.5 + 5 / 6) / 2,  # of 0 and 1, the best is what pass says
            "eval/easy/best@4": 1.0,
            "eval/hard/mean@4": 0.125,  # unscored counts as wrong
            "eval/hard/pass@1": 0.0,
            "eval/hard/pass@2": 0.0,
            "eval/hard/pass@4": 0.0,
            "eval/hard/best@1": 0.125,
            "eval/hard/best@2": 0.25,  # the 0.5 is in three of the six pairs
            "eval/hard/best@4": 0.5,
        }
    )
    assert next(iter(evaluation.metrics)) == "eval/easy/mean@4"  # the first is the one an evaluation is known by
    assert evaluation.score == pytest.approx((0.25 + 0.5 + 0.125) / 3)
    rows = [json.loads(line) for line in directory.evaluation_of(7).read_text().splitlines()]
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [(p, s) for p in range(3) for s in range(4)]
    assert rows[10] == {
        "prompt_id": 2, "sample": 2, "source": "hard", "prompt": "question 2", "response": "text 2", "target": "1",
        "answer": None, "reward": 0.0, "reward_error": "timeout",
    }  # fmt: skip


def test_a_sample_passes_with_full_marks_only(tmp_path):
    rewards = {0: [2.0] * 4, 1: [1.0] * 4, 2: [2.0, 1.0, 1.0, 1.0]}
    evaluation = make_evaluator(tmp_path, rewards, full_marks={"easy": 2.0, "hard": 2.0})[0].evaluate(1)
    assert evaluation.metrics["eval/easy/pass@1"] == 0.5
    assert evaluation.metrics["eval/hard/pass@1"] == 0.25


def test_full_marks_are_those_of_the_source(tmp_path):
    rewards = {0: [2.0] * 4, 1: [1.0] * 4, 2: [0.5, 0.3, 0.2 + 0.1, 0.0]}
    evaluation = make_evaluator(tmp_path, rewards, full_marks={"easy": 2.0, "hard": 0.3})[0].evaluate(1)
    assert evaluation.metrics["eval/easy/pass@1"] == 0.5
    assert evaluation.metrics["eval/hard/pass@1"] == 0.75


def test_a_source_without_full_marks_has_no_pass(tmp_path):
    evaluation = make_evaluator(tmp_path, {n: [7.0] * 4 for n in range(3)}, full_marks={"easy": 1.0})[0].evaluate(1)
    of_hard = {name.removeprefix("eval/hard/") for name in evaluation.metrics if name.startswith("eval/hard/")}
    assert of_hard == {"mean@4", "best@1", "best@2", "best@4"}
    assert evaluation.metrics["eval/easy/pass@4"] == 1.0


def test_two_evaluations_use_the_same_seeds(tmp_path):
    evaluator, generator, _ = make_evaluator(tmp_path, {0: [1.0] * 4, 1: [1.0] * 4, 2: [1.0] * 4})
    evaluator.evaluate(1)
    evaluator.evaluate(2)
    first, second = generator.seeds
    assert first == second
    assert len({seed for own in first for seed in own}) == 12


def rows_of(source, *prompts):
    """Rows as an evaluation has them, from (answer, reward) pairs; a reward of None is a sample without a score."""
    return [
        {
            "source": source,
            "prompt_id": f"{source} {number}",
            "sample": index,
            "answer": answer,
            "reward": reward or 0.0,
            "reward_error": "timeout" if reward is None else None,
        }
        for number, samples in enumerate(prompts)
        for index, (answer, reward) in enumerate(samples)
    ]


def majorities(rows):
    return {name: value for name, value in metrics_of(rows, ONE).items() if "/maj@" in name}


def test_majority_votes_by_hand():
    right, wrong = ("7", 1.0), ("8", 0.0)
    rows = rows_of("sums", [right, right, right, wrong], [right, wrong, wrong, ("9", 0.0)])
    assert majorities(rows) == pytest.approx(
        {
            "eval/sums/maj@1": (3 / 4 + 1 / 4) / 2,
            # Pairs: 3 of 6 all right and 3 tied; 3 of 6 hold the right one, each tied.
            "eval/sums/maj@2": (3 / 6 + 3 / 6 / 2 + 3 / 6 / 2) / 2,
            "eval/sums/maj@4": (1.0 + 0.0) / 2,
        },
        abs=1e-15,
    )


def test_responses_without_an_answer_vote_for_none():
    """Neither a response in which none was found nor a sample that could not be scored supports another answer."""
    rows = rows_of("sums", [("7", 1.0), ("", 0.0), (None, None)])
    assert majorities(rows) == pytest.approx(
        {"eval/sums/maj@1": 1 / 3, "eval/sums/maj@2": (1 / 2 + 1 / 2 + 0) / 3, "eval/sums/maj@3": 0.0}, abs=1e-15
    )


def test_no_majority_where_the_reward_tells_no_answer():
    told, silent = [("7", 1.0), ("7", 1.0)], [(None, 1.0), (None, 0.0)]
    failed = [(None, None), (None, None)]
    rows = rows_of("told", told) + rows_of("mixed", told, silent) + rows_of("failed", failed)
    assert set(majorities(rows)) == {"eval/told/maj@1", "eval/told/maj@2"}


@pytest.mark.parametrize(
    ("n", "expected"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_powers_of_two_and_all_samples_are_reported(n, expected):
    assert draws(n) == expected


class OfTwo(Solo):
    """One of two ranks, which hears from the other what that one has gathered."""

    size = 2

    def __init__(self, rank, heard):
        self.rank = rank
        self.heard = heard

    def gather(self, value):
        self.heard[self.rank] = value
        return [self.heard.get(rank, []) for rank in range(2)]


def test_ranks_share_prompts_and_agree_with_one(tmp_path):
    rewards = {0: [1.0, 0.1, 0.2, 0.7], 1: [1.0, 1.0, 0.3, 0.0], 2: [0.5, 0.6, None, 0.0]}
    alone = make_evaluator(tmp_path, rewards)[0].evaluate(1)
    heard = {}
    for rank in (0, 1):
        evaluator, _, directory = make_evaluator(tmp_path / str(rank), rewards)
        evaluator.ranks = OfTwo(rank, heard)
        together = evaluator.evaluate(1)
    assert (together.metrics, together.score, together.rows) == (alone.metrics, alone.score, alone.rows)
    assert directory.evaluation_of(1).exists()
