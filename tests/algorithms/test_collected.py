"""What algorithms ask of a collection: groups refilled (DAPO), one greedy answer (ReMax), rewards apart (GDPO)."""

import json

import pytest
import torch

from ullage.algorithms._compose import compose
from ullage.base.communicator import Solo
from ullage.base.seeds import derive
from ullage.config.tree import Config
from ullage.data.prompts import Prompt
from ullage.data.sampler import Sampler
from ullage.rewards.pool import Score
from ullage.rollout.sampling import Sample
from ullage.telemetry.run_directory import RunDirectory
from ullage.telemetry.tally import Tally
from ullage.telemetry.writer import MetricsWriter
from ullage.trainer.collect import Collector, to_parts
from ullage.trainer.schedule import Schedule

NUM_PROMPTS = 12
PROMPTS = [
    Prompt(id=100 + n, token_ids=(5,) * (n + 1), prompt=f"p{n}", target=str(n), source="s", extra={})
    for n in range(NUM_PROMPTS)
]


class ScriptedGenerator:
    """Samples whose token is the prompt's number and whose rewards are given by prompt; greedy ones have their own."""

    def __init__(self, rewards, greedy=None, reward_names=("own",)):
        self.rewards, self.greedy, self.reward_names = rewards, greedy, reward_names
        self.calls = []

    def run(self, prompts, seeds, sampling, phases):
        self.calls.append(([prompt.id for prompt in prompts], seeds, sampling))
        given = self.greedy if sampling.temperature == 0 else self.rewards
        samples, scores = [], []
        for group, (prompt, own) in enumerate(zip(prompts, seeds, strict=True)):
            for index in range(len(own)):
                tokens = (prompt.id - 100 + 4,) * (index + 1)
                logprobs = (-0.5,) * len(tokens)
                samples.append(
                    Sample(group=group, index=index, token_ids=tokens, logprobs=logprobs, finish_reason="stop")
                )
                reward = given[prompt.id - 100]
                reward = reward if isinstance(reward, float | None) else reward[index]
                parts = reward if isinstance(reward, dict) else {} if reward is None else {"own": reward}
                total = None if reward is None else sum(parts.values())
                scores.append(Score(total, parts, None))
        return samples, scores, ["text"] * len(samples)


class Quiet:
    """A recorder that nobody reads."""

    def event(self, text):
        pass


def make_collector(folder, generator, name, *, ranks=None, batch_size=4, **options):
    config = Config.model_validate(
        {
            "data": {"train_batch_size": batch_size, "max_response_length": 4},
            "actor_rollout_ref": {"rollout": {"n": 2}, "actor": options.pop("actor", {})},
            "algorithm": {"name": name, **options.pop("algorithm", {})},
            "reward": {"functions": [{"name": n} for n in generator.reward_names], **options},
        }
    )
    directory = RunDirectory(folder, f"run-{(ranks or Solo()).rank}-{(ranks or Solo()).size}")
    directory.create()
    sampler = Sampler(NUM_PROMPTS, batch_size, seed=1, shuffle=True)
    ranks = ranks or Solo()
    writer = MetricsWriter(directory)
    collector = Collector(config, PROMPTS, sampler, generator, compose(config), ranks, Quiet(), writer)
    return collector, config, directory


# --- refill ---

SIGNAL = {1, 4, 6, 7, 10}
"""Five of twelve prompts have two different rewards."""
REWARDS = {n: (1.0, 0.0) if n in SIGNAL else (1.0, 1.0) for n in range(NUM_PROMPTS)}


def expected_groups(batches, count):
    """(attempt, prompt) of the groups with signal, in the order a lone process draws them."""
    sampler = Sampler(NUM_PROMPTS, 4, seed=1, shuffle=True)
    found = []
    for attempt in range(batches):
        found += [(attempt, row) for row in sampler.next_batch() if row in SIGNAL]
        if len(found) >= count:
            break
    return found[:count], sampler, attempt + 1


def groups_of(experience):
    """The prompts kept, by their place in the step."""
    places = sorted((int(experience.order_G[g]), len(experience.prompts[g]) - 1) for g in experience.group_N.unique())
    return places


def test_a_step_ends_with_as_many_groups_as_it_has_prompts(tmp_path):
    generator = ScriptedGenerator(REWARDS)
    collector, _, _ = make_collector(tmp_path, generator, "dapo")
    tally = Tally()
    experience = collector.collect(3, tally)
    want, sampler, attempts = expected_groups(10, 4)
    assert attempts > 1
    assert groups_of(experience) == [(place, row) for place, (_, row) in enumerate(want)]
    assert len(experience.responses) == 2 * 4
    assert experience.signal_N.all()
    assert len(generator.calls) == attempts
    assert collector.sampler.state() == sampler.state()
    # Each number stays with its sample, whatever batch it came from and however long the others are.
    for i, response in enumerate(experience.responses):
        row = len(experience.prompts[int(experience.group_N[i])]) - 1
        assert set(response) == {row + 4}
        assert experience.mask_NT[i].tolist() == [place < len(response) for place in range(2)]
        assert experience.rewards_N[i].item() == REWARDS[row][len(response) - 1]
    assert len(set(experience.sample_N.tolist())) == 8
    means = tally.means(Solo())
    share = sum(row in SIGNAL for call in generator.calls for row in [i - 100 for i in call[0]]) / (4 * attempts)
    assert means["group/zero_std_fraction"] == pytest.approx(1 - share)


def test_attempts_have_seeds_of_their_own(tmp_path):
    generator = ScriptedGenerator(REWARDS)
    make_collector(tmp_path, generator, "dapo")[0].collect(3, Tally())
    for attempt, (ids, seeds, _) in enumerate(generator.calls):
        assert seeds == [[derive(1, 3, i, index, attempt, 0) for index in range(2)] for i in ids]


def test_a_step_goes_on_with_what_it_has_when_the_budget_is_spent(tmp_path):
    generator = ScriptedGenerator(REWARDS)
    algorithm = {"filter_groups": {"max_num_gen_batches": 2}}
    collector, config, _ = make_collector(tmp_path, generator, "dapo", algorithm=algorithm, batch_size=4)
    experience = collector.collect(1, Tally())
    want, _, _ = expected_groups(2, 99)
    assert len(generator.calls) == 2
    assert 0 < len(want) < 4
    assert groups_of(experience) == [(place, row) for place, (_, row) in enumerate(want)]
    batch = collector.algorithm.assign_credit(experience, Solo())
    (mini_batch,) = Schedule(config, "token-mean", Solo()).mini_batches(batch, step=1)
    assert len(mini_batch.responses) == 2 * len(want)


def test_a_step_without_any_signal_updates_nothing(tmp_path):
    generator = ScriptedGenerator(dict.fromkeys(range(NUM_PROMPTS), (1.0, 1.0)))
    collector, config, _ = make_collector(tmp_path, generator, "dapo")
    experience = collector.collect(1, Tally())
    assert len(generator.calls) == 10
    assert experience.responses == ()
    batch = collector.algorithm.assign_credit(experience, Solo())
    assert list(Schedule(config, "token-mean", Solo()).mini_batches(batch, step=1)) == []


def test_samples_of_every_attempt_are_logged_in_order(tmp_path):
    generator = ScriptedGenerator(REWARDS)
    collector, _, directory = make_collector(tmp_path, generator, "dapo")
    collector.collect(1, Tally())
    rows = [json.loads(line) for line in directory.samples_of(1).read_text().splitlines()]
    assert [row["prompt_id"] for row in rows] == [i for ids, _, _ in generator.calls for i in ids for _ in range(2)]
    assert [row["order"] for row in rows[::2]] == list(range(4 * len(generator.calls)))


@pytest.mark.parametrize("term", [{"use_kl_loss": True}, {"entropy_coeff": 0.1}])
def test_groups_are_judged_by_their_rewards_whatever_else_has_a_gradient(tmp_path, term):
    want = expected_groups(10, 4)[0]
    for name in ("dapo", "reinforce_plus_plus"):
        algorithm = {"filter_groups": {"enable": True}}
        collector, _, _ = make_collector(
            tmp_path / name, ScriptedGenerator(REWARDS), name, actor=term, algorithm=algorithm
        )
        assert groups_of(collector.collect(1, Tally())) == [(place, row) for place, (_, row) in enumerate(want)]


def test_kl_in_the_reward_does_not_stop_the_refill(tmp_path):
    algorithm = {"use_kl_in_reward": True}
    collector, _, _ = make_collector(tmp_path, ScriptedGenerator(REWARDS), "dapo", algorithm=algorithm)
    want = expected_groups(10, 4)[0]
    assert groups_of(collector.collect(1, Tally())) == [(place, row) for place, (_, row) in enumerate(want)]


class Lockstep(Solo):
    """One of two ranks; each call waits for the other's value."""

    size = 2

    def __init__(self, rank, barrier, board):
        self.rank, self.barrier, self.board = rank, barrier, board

    def gather(self, value):
        self.board[self.rank] = value
        self.barrier.wait(timeout=20)
        both = list(self.board)
        self.barrier.wait(timeout=20)
        return both

    def sum(self, values):
        return [sum(column) for column in zip(*self.gather(list(values)), strict=True)]


def on_two_ranks(work):
    """What `work(communicator)` gives on each rank."""
    import threading

    barrier, board, results = threading.Barrier(2), [None, None], [None, None]

    def run(rank):
        results[rank] = work(Lockstep(rank, barrier, board))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("batch_size", [4, 3])
def test_two_ranks_keep_the_groups_of_one(tmp_path, batch_size):
    def collected(ranks):
        collector, _, _ = make_collector(
            tmp_path, ScriptedGenerator(REWARDS), "dapo", ranks=ranks, batch_size=batch_size
        )
        experiences = [collector.collect(step, Tally()) for step in (1, 2)]
        return experiences, collector.sampler.state()

    alone, state = collected(Solo())
    both = on_two_ranks(collected)
    for step in range(2):
        parts = [both[rank][0][step] for rank in range(2)]
        assert sorted(group for part in parts for group in groups_of(part)) == groups_of(alone[step])
        numbers = sorted(int(n) for part in parts for n in part.sample_N)
        assert numbers == sorted(alone[step].sample_N.tolist())
    for rank in range(2):
        experiences, rank_state = both[rank]
        assert rank_state == state
        assert any(groups_of(experience) for experience in experiences)


# --- one greedy answer ---


def test_remax_compares_with_the_reward_of_one_greedy_answer(tmp_path):
    greedy = {n: n / 2 for n in range(NUM_PROMPTS)}
    generator = ScriptedGenerator(REWARDS, greedy=greedy)
    collector, _, _ = make_collector(tmp_path, generator, "remax")
    tally = Tally()
    experience = collector.collect(1, tally)
    (ids, seeds, sampling), (greedy_ids, greedy_seeds, greedy_sampling) = generator.calls
    assert ids == greedy_ids
    assert (sampling.temperature, greedy_sampling.temperature) == (1.0, 0.0)
    assert [list(own) for own in greedy_seeds] == [list(own)[:1] for own in seeds]
    assert experience.baseline_G.tolist() == [greedy[i - 100] for i in ids]
    rows = [i - 100 for i in ids for _ in range(2)]
    want = [REWARDS[row][i % 2] - greedy[row] for i, row in enumerate(rows)]
    batch = collector.algorithm.assign_credit(experience, Solo())
    assert batch.advantages_NT[:, 0].tolist() == want
    assert experience.signal_N.tolist() == [advantage != 0 for advantage in want]
    # The greedy answers are no part of what is trained on, nor of the curves.
    assert len(experience.responses) == 8
    assert tally.means(Solo())["reward/mean"] == pytest.approx(sum(REWARDS[r][i % 2] for i, r in enumerate(rows)) / 8)


def test_a_greedy_answer_that_cannot_be_scored_counts_as_0(tmp_path):
    generator = ScriptedGenerator(REWARDS, greedy=dict.fromkeys(range(NUM_PROMPTS)))
    collector, _, _ = make_collector(tmp_path, generator, "remax")
    assert collector.collect(1, Tally()).baseline_G.tolist() == [0.0] * 4


def test_greedy_answers_of_refilled_groups_stay_with_them(tmp_path):
    greedy = {n: float(n) for n in range(NUM_PROMPTS)}
    generator = ScriptedGenerator(REWARDS, greedy=greedy)
    algorithm = {"filter_groups": {"enable": True}}
    collector, _, _ = make_collector(tmp_path, generator, "remax", algorithm=algorithm)
    experience = collector.collect(1, Tally())
    rows = [len(experience.prompts[group]) - 1 for group in experience.group_N.tolist()]
    assert experience.baseline_G[experience.group_N].tolist() == [float(row) for row in rows]


# --- rewards apart ---


def test_gdpo_sees_each_functions_reward(tmp_path):
    names = ("exact", "brief")
    rewards = {n: ({"exact": float(n % 2), "brief": -n / 4}, {"exact": 0.5, "brief": 0.25}) for n in range(NUM_PROMPTS)}
    generator = ScriptedGenerator(rewards, reward_names=names)
    collector, _, _ = make_collector(tmp_path, generator, "gdpo")
    experience = collector.collect(1, Tally())
    rows = [i - 100 for i in generator.calls[0][0]]
    want = [[rewards[row][index][name] for name in names] for row in rows for index in range(2)]
    assert experience.reward_parts_NK.tolist() == want
    assert experience.rewards_N.tolist() == [sum(parts) for parts in want]
    batch = collector.algorithm.assign_credit(experience, Solo())
    assert batch.advantages_NT.abs().sum() > 0


def test_parts_are_in_the_order_of_the_config_whoever_answers_first():
    """The first sample has no part of the first function, and one function says nothing at all."""
    scores = [Score(2.0, {"second": 2.0, "second/detail": 9.0}, None), Score(1.0, {"first": 1.0}, None)]
    assert to_parts(scores, ["first", "second", "third"]).tolist() == [[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]]
    assert to_parts([], ["first", "second"]).shape == (0, 2)


def test_gdpo_on_a_rank_without_prompts(tmp_path):
    class SecondOfTwo(Solo):
        rank = 1
        size = 2

    generator = ScriptedGenerator(REWARDS)
    collector, _, _ = make_collector(tmp_path, generator, "gdpo", ranks=SecondOfTwo(), batch_size=1)
    experience = collector.collect(1, Tally())
    assert experience.responses == ()
    batch = collector.algorithm.assign_credit(experience, Solo())
    assert batch.advantages_NT.shape == (0, 1)


# --- long answers ---


def test_long_answers_lose_reward_for_credit_but_not_in_the_curves(tmp_path):
    """Answers of one and two tokens, four allowed, a buffer of three: the second loses a third."""
    generator = ScriptedGenerator(dict.fromkeys(range(NUM_PROMPTS), (1.0, 1.0)))
    buffer = {"length": 3, "penalty_factor": 0.6}
    collector, _, _ = make_collector(tmp_path, generator, "grpo", overlong_buffer=buffer)
    tally = Tally()
    experience = collector.collect(1, tally)
    torch.testing.assert_close(
        experience.rewards_N, torch.tensor([1.0, 0.8] * 4, dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert experience.signal_N.all()
    assert tally.means(Solo())["reward/mean"] == 1.0
