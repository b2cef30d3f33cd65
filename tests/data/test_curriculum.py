"""The curriculum: the plain order until something is learned, then frequencies by success rate; resumable exactly."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.base.errors import DataError
from ullage.data.curriculum import Curriculum, chance
from ullage.data.sampler import Sampler

# The same examples on every machine, however slow it is.
repeatable = settings(derandomize=True, deadline=None)


def draw(sampler, count):
    return [sampler.next_batch() for _ in range(count)]


@pytest.mark.parametrize(
    ("rate", "expected"), [(0.5, 1.0), (0.25, 0.75), (0.75, 0.75), (0.125, 0.4375), (0.0, 0.1), (1.0, 0.1), (0.01, 0.1)]
)
def test_the_chance_of_a_prompt(rate, expected):
    assert chance(rate) == expected


def test_nothing_learned_is_the_plain_order():
    plain, curriculum = Sampler(8, 4, seed=1, shuffle=True), Curriculum(8, 4, seed=1, shuffle=True)
    assert draw(curriculum, 6) == draw(plain, 6)
    assert curriculum.batches_per_epoch == plain.batches_per_epoch == 2


def test_prompts_that_have_not_been_seen_come_before_any_comes_twice():
    sampler = Curriculum(30, 4, seed=2, shuffle=True)
    seen = []
    for _ in range(7):
        batch = sampler.next_batch()
        sampler.learn(dict.fromkeys(batch, 0.5))
        seen += batch
    assert len(set(seen)) == 28
    assert {*seen, *sampler.next_batch()} == set(range(30))  # the last two, and two of the next epoch


def test_frequencies_follow_the_chances():
    """Of 200 epochs, rows of rate 1/2 are drawn in all, of 1/4 in 3/4 and of 0 and 1 in a tenth."""
    rates = [0.5, 0.25, 0.0, 1.0]
    sampler = Curriculum(400, 20, seed=3, shuffle=True)
    sampler.learn({row: rates[row % 4] for row in range(400)})
    drawn = Counter()
    while sampler.epoch < 200:
        drawn.update(row % 4 for row in sampler.next_batch())
    assert drawn[0] == pytest.approx(200 * 100, abs=20)
    # Five standard deviations of 20 000 coins.
    assert drawn[1] == pytest.approx(0.75 * 200 * 100, abs=5 * (20_000 * 0.75 * 0.25) ** 0.5)
    for kind in (2, 3):
        assert drawn[kind] == pytest.approx(0.1 * 200 * 100, abs=5 * (20_000 * 0.1 * 0.9) ** 0.5)


def test_the_last_rate_counts():
    sampler = Curriculum(2, 1, seed=4, shuffle=False)
    sampler.learn({0: 0.5, 1: 0.0})
    sampler.learn({1: 0.5})
    assert draw(sampler, 6) == [[0], [1]] * 3


def test_a_batch_that_wants_every_prompt_gets_each_once_even_if_all_are_solved():
    sampler = Curriculum(6, 6, seed=5, shuffle=True)
    sampler.learn(dict.fromkeys(range(6), 1.0))
    for batch in draw(sampler, 5):
        assert sorted(batch) == list(range(6))
    assert sampler.epoch > 10


@repeatable
@given(
    num_rows=st.integers(1, 30),
    batch_size=st.integers(1, 10),
    seed=st.integers(0, 1000),
    shuffle=st.booleans(),
    before=st.integers(0, 20),
    after=st.integers(1, 20),
)
def test_resumed_anywhere_continues_as_if_never_stopped(num_rows, batch_size, seed, shuffle, before, after):
    batch_size = min(batch_size, num_rows)

    def steps(sampler, count):
        batches = []
        for _ in range(count):
            batches.append(sampler.next_batch())
            assert len(set(batches[-1])) == batch_size
            sampler.learn({row: (row * 7 + sampler.epoch) % 5 / 4 for row in batches[-1]})
        return batches

    uninterrupted = steps(Curriculum(num_rows, batch_size, seed=seed, shuffle=shuffle), before + after)
    stopped = Curriculum(num_rows, batch_size, seed=seed, shuffle=shuffle)
    steps(stopped, before)
    state = json.loads(json.dumps(stopped.state()))
    assert stopped.state() == state  # as JSON has it
    resumed = Curriculum(num_rows, batch_size, seed=seed, shuffle=shuffle)
    resumed.restore(state)
    assert resumed.state() == state
    assert steps(resumed, after) == uninterrupted[before:]


def test_a_state_is_not_changed_by_what_follows():
    sampler = Curriculum(4, 2, seed=1, shuffle=True)
    state = sampler.state()
    sampler.learn({0: 1.0})
    assert state["rates"] == [None] * 4
    sampler.restore(state)
    sampler.learn({1: 1.0})
    assert state["rates"] == [None] * 4


def test_other_data_cannot_continue():
    with pytest.raises(DataError, match="num_rows was 4, now 5"):
        Curriculum(5, 2, seed=1, shuffle=True).restore(Curriculum(4, 2, seed=1, shuffle=True).state())
