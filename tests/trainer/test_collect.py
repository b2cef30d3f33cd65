"""From an engine's samples to experience, metrics and logged rows."""

import dataclasses
import json

import pytest
import torch

from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.base.seeds import derive
from ullage.config.tree import Config
from ullage.data.curriculum import Curriculum
from ullage.data.prompts import Prompt
from ullage.data.sampler import Sampler
from ullage.maths.advantages_token import gdpo
from ullage.rewards.pool import Score
from ullage.rollout.sampling import Sample
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.tally import Tally
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.collect import Collector, to_parts, to_rollouts

PROMPTS = [
    Prompt(id=10 + n, token_ids=(5,) * (n + 1), prompt=f"p{n}", target=str(n), source="s", extra={}) for n in range(4)
]


def sample(group, index, *token_ids, reason="stop"):
    logprobs = tuple(-0.5 * (place + 1) for place in range(len(token_ids)))
    return Sample(group=group, index=index, token_ids=token_ids, logprobs=logprobs, finish_reason=reason)


def test_samples_become_rollouts():
    samples = [sample(0, 0, 3, 2), sample(0, 1, 4, 4, 4, reason="length"), sample(1, 0, 2), sample(1, 1, 6, 2)]
    rollouts = to_rollouts(PROMPTS[:2], [4, 9], samples)
    assert rollouts.prompts == ((5,), (5, 5))
    assert rollouts.order_G.tolist() == [4, 9]
    assert rollouts.group_N.tolist() == [0, 0, 1, 1]
    assert rollouts.responses == ((3, 2), (4, 4, 4), (2,), (6, 2))
    assert rollouts.mask_NT.tolist() == [[True, True, False], [True] * 3, [True, False, False], [True, True, False]]
    assert rollouts.rollout_logprobs_NT.tolist() == [[-0.5, -1, 0], [-0.5, -1, -1.5], [-0.5, 0, 0], [-0.5, -1, 0]]
    assert rollouts.finish_reasons == ("stop", "length", "stop", "stop")


def test_a_rank_without_prompts_has_empty_rollouts():
    rollouts = to_rollouts([], [], [])
    assert (rollouts.mask_NT.shape, rollouts.order_G.dtype, rollouts.responses) == ((0, 1), torch.long, ())


class FixedGenerator:
    """Two samples for every prompt; the rewards are given by prompt id."""

    reward_names = ("own",)

    def __init__(self, rewards):
        self.rewards = rewards

    def run(self, prompts, seeds, sampling, phases):
        self.seeds = seeds
        samples = [sample(group, index, 7, 2) for group in range(len(prompts)) for index in range(2)]
        rewards = [self.rewards[prompts[made.group].id][made.index] for made in samples]
        scores = [Score(reward, {} if reward is None else {"own": reward}, None) for reward in rewards]
        return samples, scores, ["text"] * len(samples)


def make_collector(
    tmp_path, rewards, *, ranks=None, log_samples=64, prompts=PROMPTS, sampler=None, full_marks=None, **actor
):
    config = Config.model_validate(
        {
            "data": {"train_batch_size": 4, "shuffle": False},
            "actor_rollout_ref": {"rollout": {"n": 2}, "actor": actor},
            "trainer": {"log_samples": log_samples},
        }
    )
    directory = RunDirectory(tmp_path, "run")
    directory.create()
    generator = FixedGenerator(rewards)
    collector = Collector(
        config,
        prompts,
        sampler or Sampler(4, 4, seed=1, shuffle=False),
        generator,
        compose(config),
        ranks or Solo(),
        None,
        MetricsWriter(directory),
        full_marks=full_marks,
    )
    return collector, generator, directory


REWARDS = {10: [1.0, 0.0], 11: [1.0, 1.0], 12: [None, 1.0], 13: [0.0, 0.5]}


def test_metrics_count_what_they_say(tmp_path):
    tally = Tally()
    collector, _, _ = make_collector(tmp_path, REWARDS)
    collector.collect(1, tally)
    means = tally.means(Solo())
    assert means["reward/failed_fraction"] == 1 / 8
    assert means["reward/mean"] == pytest.approx(4.5 / 7)  # of those that have one
    assert means["reward/own"] == pytest.approx(4.5 / 7)
    assert means["response/length_mean"] == 2
    assert means["response/truncated_fraction"] == 0
    assert means["group/zero_std_fraction"] == 0.25  # of the second prompt


def test_only_groups_with_signal_are_worth_a_pass(tmp_path):
    """Equal rewards have none, an unscored sample has none; one that is left alone in its group has its reward."""
    experience = make_collector(tmp_path, REWARDS)[0].collect(1, Tally())
    assert experience.signal_N.tolist() == [True, True, False, False, False, True, True, True]
    assert experience.valid_N.tolist() == [True, True, True, True, False, True, True, True]
    assert not experience.mask_NT[4].any()


@pytest.mark.parametrize("term", [{"use_kl_loss": True}, {"entropy_coeff": 0.01}])
def test_a_kl_or_entropy_term_gives_every_scored_sample_signal(tmp_path, term):
    tally = Tally()
    experience = make_collector(tmp_path, REWARDS, **term)[0].collect(1, tally)
    assert experience.signal_N.tolist() == experience.valid_N.tolist()
    assert tally.means(Solo())["group/zero_std_fraction"] == 0.25  # of the rewards, whatever else has a gradient


def test_seeds_come_from_step_prompt_and_sample_alone(tmp_path):
    collector, generator, _ = make_collector(tmp_path, REWARDS)
    collector.collect(3, Tally())
    assert generator.seeds == [[derive(1, 3, prompt.id, index, 0, 0) for index in (0, 1)] for prompt in PROMPTS]


class SecondOfTwo(Solo):
    rank = 1
    size = 2


def test_a_rank_takes_every_second_prompt_of_the_batch(tmp_path):
    collector, _, directory = make_collector(tmp_path, REWARDS, ranks=SecondOfTwo())
    experience = collector.collect(1, Tally())
    assert experience.order_G.tolist() == [1, 3]
    assert experience.prompts == ((5, 5), (5, 5, 5, 5))
    rows = [json.loads(line) for line in directory.samples_of(1).read_text().splitlines()]
    assert [(row["order"], row["sample"], row["prompt_id"]) for row in rows] == [
        (1, 0, 11), (1, 1, 11), (3, 0, 13), (3, 1, 13)
    ]  # fmt: skip


def test_only_the_first_samples_of_the_batch_are_logged(tmp_path):
    collector, _, directory = make_collector(tmp_path, REWARDS, log_samples=3)
    collector.collect(1, Tally())
    rows = [json.loads(line) for line in directory.samples_of(1).read_text().splitlines()]
    assert [(row["prompt_id"], row["sample"], row["reward"]) for row in rows] == [
        (10, 0, 1.0), (10, 1, 0.0), (11, 0, 1.0)
    ]  # fmt: skip
    assert rows[0]["token_ids"] == [7, 2]


# --- several sources ---

SOURCES = ["sums", "sums", "words", "words"]
OF_TWO_SOURCES = [dataclasses.replace(prompt, source=name) for prompt, name in zip(PROMPTS, SOURCES, strict=True)]


def test_one_source_has_no_curves_of_its_own(tmp_path):
    tally = Tally()
    make_collector(tmp_path, REWARDS)[0].collect(1, tally)
    assert set(tally.means(Solo())) == {
        "reward/failed_fraction", "reward/mean", "reward/own", "response/length_mean", "response/truncated_fraction",
        "group/zero_std_fraction",
    }  # fmt: skip


def test_each_of_several_sources_has_its_curves(tmp_path):
    tally = Tally()
    make_collector(tmp_path, REWARDS, prompts=OF_TWO_SOURCES)[0].collect(1, tally)
    means = tally.means(Solo())
    assert means == pytest.approx(
        {
            "reward/failed_fraction": 1 / 8,
            "reward/mean": 4.5 / 7,
            "reward/sums/mean": 0.75,
            "reward/words/mean": 0.5,  # of the three that have one
            "reward/own": 4.5 / 7,
            "reward/sums/own": 0.75,
            "reward/words/own": 0.5,
            "response/length_mean": 2,
            "response/sums/length_mean": 2,
            "response/words/length_mean": 2,
            "response/truncated_fraction": 0,
            "group/zero_std_fraction": 0.25,
            "group/sums/zero_std_fraction": 0.5,
            "group/words/zero_std_fraction": 0,
        }
    )


def test_a_function_that_does_not_score_a_source_moves_nothing_of_it():
    """GDPO normalises each function within a group: of what is 0 for all of it, nothing is left."""
    scores = [Score(1.0, {"own": 1.0}, None), Score(0.0, {"own": 0.0}, None)]
    scores += [Score(30.0, {"other": 30.0}, None), Score(10.0, {"other": 10.0}, None)]
    parts, group_N = to_parts(scores, ["own", "other"]), torch.tensor([0, 0, 1, 1])
    valid_N, mask_NT = torch.ones(4, dtype=torch.bool), torch.ones(4, 1)
    apart = gdpo(parts, [1.0, 1.0], group_N, valid_N, mask_NT)
    assert torch.equal(apart, gdpo(parts.sum(1, keepdim=True), [1.0], group_N, valid_N, mask_NT))
    weighted = gdpo(parts, [4.0, 1.0], group_N, valid_N, mask_NT)[:, 0]
    assert (weighted / weighted[2]).tolist() == pytest.approx([4, -4, 1, -1], rel=1e-5)


# --- success rates ---


class Heard(Solo):
    """The first of two ranks, which hears what the second has to say."""

    size = 2

    def __init__(self, other):
        self.other = other

    def gather(self, value):
        return [value, json.loads(json.dumps(self.other))]


def test_the_sampler_learns_which_share_of_the_answers_had_full_marks(tmp_path):
    """By the marks of each source, over samples that could be scored."""
    sampler = Curriculum(4, 4, seed=1, shuffle=False)
    options = {"prompts": OF_TWO_SOURCES, "sampler": sampler, "full_marks": {"sums": 1.0, "words": 0.5}}
    make_collector(tmp_path, REWARDS, **options)[0].collect(1, Tally())
    assert sampler.rates == [0.5, 1.0, 1.0, 0.5]


def test_what_has_no_score_or_no_marks_is_not_learned(tmp_path):
    sampler = Curriculum(4, 4, seed=1, shuffle=False)
    options = {"prompts": OF_TWO_SOURCES, "sampler": sampler, "full_marks": {"sums": 1.0}}
    make_collector(tmp_path, REWARDS | {10: [None, None]}, **options)[0].collect(1, Tally())
    assert sampler.rates == [None, 1.0, None, None]


def test_every_rank_learns_what_the_others_saw(tmp_path):
    sampler = Curriculum(4, 4, seed=1, shuffle=False)
    collector, _, _ = make_collector(tmp_path, REWARDS, sampler=sampler, full_marks={"s": 1.0}, ranks=Heard([]))
    collector._log = lambda step, rows: None
    collector.ranks.other = [[1, 0.125], [3, 0.25]]
    collector.collect(1, Tally())
    assert sampler.rates == [0.5, 0.125, 1.0, 0.25]


def test_without_marks_nothing_is_learned(tmp_path):
    sampler = Curriculum(4, 4, seed=1, shuffle=False)
    make_collector(tmp_path, REWARDS, sampler=sampler)[0].collect(1, Tally())
    assert sampler.rates == [None] * 4
