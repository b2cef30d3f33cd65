"""Batches of several sources: quotas by hand, exact shares, epochs of each source's own, resumption, refusals."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.base.errors import ConfigError, DataError
from ullage.data.mixture import Mixture

# The same examples on every machine, however slow it is.
repeatable = settings(derandomize=True, deadline=None)
ROWS = {"sums": [0, 2, 4, 6, 8, 9], "words": [1, 3, 5, 7]}
SOURCE_OF = {row: name for name, rows in ROWS.items() for row in rows}


def mixture(weights, batch_size=4, *, rows=ROWS, shuffle=False, seed=1, **options):
    return Mixture(rows, weights, batch_size, seed=seed, shuffle=shuffle, **options)


def draw(sampler, count):
    return [sampler.next_batch() for _ in range(count)]


def quotas(batches):
    return [Counter(SOURCE_OF[row] for row in batch) for batch in batches]


def test_shares_that_fill_a_batch_exactly():
    batches = draw(mixture({"sums": 3, "words": 1}), 5)
    assert quotas(batches) == [{"sums": 3, "words": 1}] * 5
    # Each place goes to the source that is furthest behind: by 3/4 and 1/4, 1/2 and 1/2, 1/4 and 3/4, 1 and 0.
    assert [SOURCE_OF[row] for row in batches[0]] == ["sums", "sums", "words", "sums"]


def test_what_one_batch_rounds_off_the_next_make_up():
    batches = draw(mixture({"sums": 2, "words": 1}), 6)
    assert [(count["sums"], count["words"]) for count in quotas(batches)] == [(3, 1), (2, 2), (3, 1)] * 2


def test_each_source_walks_its_own_rows_and_begins_its_own_epochs():
    sampler = mixture({"sums": 1, "words": 1})
    batches = draw(sampler, 4)
    assert [sorted(row for row in batch if SOURCE_OF[row] == "sums") for batch in batches] == [
        [0, 2], [4, 6], [8, 9], [0, 2]
    ]  # fmt: skip
    assert [sorted(row for row in batch if SOURCE_OF[row] == "words") for batch in batches] == [
        [1, 3], [5, 7], [1, 3], [5, 7]
    ]  # fmt: skip
    assert {name: part.epoch for name, part in sampler.parts.items()} == {"sums": 1, "words": 1}


def test_a_draw_reaches_into_the_next_epoch():
    sampler = mixture({"odd": 2, "rest": 1}, 3, rows={"odd": [0, 1, 2], "rest": [3, 4, 5, 6]})
    batches = draw(sampler, 3)
    assert [[row for row in batch if row < 3] for batch in batches] == [[0, 1], [2, 0], [1, 2]]
    assert [[row for row in batch if row > 2] for batch in batches] == [[3], [4], [5]]


@repeatable
@given(size=st.integers(1, 9), weight=st.integers(1, 9), shuffle=st.booleans(), seed=st.integers(0, 99))
def test_every_row_of_a_source_comes_once_per_walk(size, weight, shuffle, seed):
    rows = {"a": list(range(size)), "b": list(range(size, size + 60))}
    weight = min(weight, size)
    sampler = mixture({"a": weight, "b": 3}, weight + 3, rows=rows, shuffle=shuffle, seed=seed)
    walked = Counter()
    for number in range(1, 40):
        batch = [row for row in sampler.next_batch() if row < size]
        assert len(set(batch)) == len(batch) == weight
        walked.update(batch)
        if number * weight % size == 0:
            assert set(walked.values()) == {number * weight // size}
            assert len(walked) == size


def test_an_epoch_is_as_many_batches_as_all_rows_fill():
    assert mixture({"sums": 5, "words": 1}).batches_per_epoch == 2  # ten rows in fours


def test_order_is_pinned():
    # Changing these numbers breaks the resume of every run out there.
    assert draw(mixture({"sums": 1, "words": 1}, shuffle=True), 3) == [
        [3, 9, 6, 5], [7, 1, 2, 0], [4, 5, 7, 8]
    ]  # fmt: skip


def test_a_shuffled_batch_has_no_pattern_that_ranks_would_fall_into():
    rows = {"a": list(range(0, 100, 2)), "b": list(range(1, 100, 2))}
    batches = draw(mixture({"a": 1, "b": 1}, 10, rows=rows, shuffle=True), 10)
    assert all(Counter(row % 2 for row in batch) == {0: 5, 1: 5} for batch in batches)
    first_rank = [row % 2 for batch in batches for row in batch[::2]]
    assert 15 <= sum(first_rank) <= 35


@repeatable
@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    batch_size=st.integers(1, 12),
    shuffle=st.booleans(),
    curriculum=st.booleans(),
    seed=st.integers(0, 99),
)
def test_shares_are_kept_without_repeats(weights, batch_size, shuffle, curriculum, seed):
    names = [f"s{number}" for number in range(len(weights))]
    rows = {name: list(range(start, 100, len(names))) for start, name in enumerate(names)}
    sampler = mixture(
        dict(zip(names, weights, strict=True)), batch_size, rows=rows, shuffle=shuffle, seed=seed, curriculum=curriculum
    )
    drawn = Counter()
    for number in range(1, 31):
        batch = sampler.next_batch()
        assert len(set(batch)) == len(batch) == batch_size
        drawn.update(row % len(names) for row in batch)
        for source, weight in enumerate(weights):
            share = number * batch_size * weight / sum(weights)
            assert abs(drawn[source] - share) < 1.5


def test_a_source_as_small_as_its_share_gives_all_of_it_to_every_batch():
    rows = {"few": [0, 1], "many": list(range(2, 20))}
    for batch in draw(mixture({"few": 1, "many": 1}, 4, rows=rows, shuffle=True), 9):
        assert {0, 1} < set(batch)


@repeatable
@given(
    before=st.integers(0, 12),
    after=st.integers(1, 12),
    shuffle=st.booleans(),
    curriculum=st.booleans(),
    seed=st.integers(0, 99),
)
def test_resumed_anywhere_continues_as_if_never_stopped(before, after, shuffle, curriculum, seed):
    def steps(sampler, count):
        batches = []
        for _ in range(count):
            batches.append(sampler.next_batch())
            sampler.learn({row: row % 3 / 2 for row in batches[-1]})
        return batches

    def made():
        return mixture({"sums": 2, "words": 1.5}, 3, shuffle=shuffle, seed=seed, curriculum=curriculum)

    uninterrupted = steps(made(), before + after)
    stopped = made()
    steps(stopped, before)
    state = json.loads(json.dumps(stopped.state()))
    assert stopped.state() == state  # as JSON has it
    resumed = made()
    resumed.restore(state)
    assert resumed.state() == state
    assert steps(resumed, after) == uninterrupted[before:]


def test_a_state_is_not_changed_by_what_follows():
    """A step that is discarded goes back to the state taken before it."""
    sampler = mixture({"sums": 1, "words": 1}, curriculum=True)
    before = sampler.state()
    copy = json.loads(json.dumps(before))
    batch = sampler.next_batch()
    sampler.learn(dict.fromkeys(batch, 1.0))
    assert before == copy
    sampler.restore(before)
    assert sampler.state() == copy
    assert sampler.next_batch() == batch


def test_rates_reach_the_curriculum_of_their_source():
    sampler = mixture({"sums": 1, "words": 1}, curriculum=True)
    sampler.learn({4: 0.25, 3: 1.0})
    assert sampler.parts["sums"].rates == [None, None, 0.25, None, None, None]
    assert sampler.parts["words"].rates == [None, 1.0, None, None]


def test_a_weight_for_an_unknown_source():
    with pytest.raises(ConfigError) as caught:
        mixture({"sums": 1, "word": 1})
    assert caught.value.cause == "data.mixing_weights.word: no training prompt is of this source"
    assert caught.value.remedy == "did you mean 'words'? The data has sums, words"


def test_a_source_without_a_weight():
    with pytest.raises(ConfigError) as caught:
        mixture({"words": 1})
    assert caught.value.cause == "data.mixing_weights: no weight for the source(s) sums; the data has sums, words"
    assert caught.value.remedy == "give every source a weight, or leave its rows out of data.train_files"


def test_a_source_smaller_than_its_share():
    with pytest.raises(DataError) as caught:
        mixture({"sums": 1, "words": 3}, 8)
    assert caught.value.cause == (
        "the source 'words' has 4 prompts, fewer than its share of a batch: 6 of data.train_batch_size=8"
    )
    assert caught.value.remedy == "lower data.train_batch_size or data.mixing_weights.words, or add data"


def test_other_weights_cannot_continue():
    state = mixture({"sums": 1, "words": 1}).state()
    with pytest.raises(DataError, match=r"data\.mixing_weights was .*'words': 1.*, now .*'words': 2"):
        mixture({"sums": 1, "words": 2}).restore(state)
