"""Evaluation: hand-computed pass@k, means per source, unscored samples, the same seeds every time."""

import json

import pytest

from ullage.base.communicator import Solo
from ullage.config.tree import Config
from ullage.data.prompts import Prompt
from ullage.rewards.pool import Score
from ullage.rollout.sampling import Sample
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.evaluate import Evaluator, pass_at_k


@pytest.mark.parametrize(
    ("n", "passed", "k", "expected"),
    [
        (4, 0, 1, 0.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (4, 1, 4, 1.0),
        (4, 2, 2, 1 - 1 / 6),
        (5, 2, 2, 0.7),  # 1 - C(3, 2) / C(5, 2) = 1 - 3 / 10
        (8, 3, 4, 1 - 5 / 70),
        (4, 4, 1, 1.0),
        (4, 3, 2, 1.0),  # of any two, at least one passed
    ],
)
def test_pass_at_k(n, passed, k, expected):
    assert pass_at_k(n, passed, k) == pytest.approx(expected, abs=1e-15)


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


def make_evaluator(tmp_path, rewards, *, full_marks=1.0):
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
            "eval/hard/mean@4": 0.125,  # unscored counts as wrong
            "eval/hard/pass@1": 0.0,
            "eval/hard/pass@2": 0.0,
            "eval/hard/pass@4": 0.0,
        }
    )
    assert evaluation.score == pytest.approx((0.25 + 0.5 + 0.125) / 3)
    rows = [json.loads(line) for line in directory.evaluation_of(7).read_text().splitlines()]
    assert [(row["prompt_id"], row["sample"]) for row in rows] == [(p, s) for p in range(3) for s in range(4)]
    assert rows[10] == {
        "prompt_id": 2, "sample": 2, "source": "hard", "prompt": "question 2", "response": "text 2", "target": "1",
        "reward": 0.0, "reward_error": "timeout",
    }  # fmt: skip


def test_a_sample_passes_with_full_marks_only(tmp_path):
    rewards = {0: [2.0] * 4, 1: [1.0] * 4, 2: [2.0, 1.0, 1.0, 1.0]}
    evaluation = make_evaluator(tmp_path, rewards, full_marks=2.0)[0].evaluate(1)
    assert evaluation.metrics["eval/easy/pass@1"] == 0.5
    assert evaluation.metrics["eval/hard/pass@1"] == 0.25


def test_two_evaluations_use_the_same_seeds(tmp_path):
    evaluator, generator, _ = make_evaluator(tmp_path, {0: [1.0] * 4, 1: [1.0] * 4, 2: [1.0] * 4})
    evaluator.evaluate(1)
    evaluator.evaluate(2)
    first, second = generator.seeds
    assert first == second
    assert len({seed for own in first for seed in own}) == 12
