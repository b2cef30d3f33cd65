"""The fullest micro-batches under a limit, counted by hand and against the packing of runs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.batch.pack import Limits, pack
from ullage.planner.passes import (
    MORE_TOKENS,
    Block,
    Room,
    long_prompts,
    many_prompts,
    more_keys_of,
    short_prompts,
    tokens_of,
    worst_mixes,
)


def test_long_prompts_make_whole_groups_then_part_of_one_and_a_shorter_one():
    room = Room(tokens=5000, groups=10, n=4, prompt=1000, response=101)
    blocks = long_prompts(room)  # 3 x 1400 and 800 left: too few for a prompt of full length
    assert blocks == [Block(1000, 4, 101), Block(1000, 4, 101), Block(1000, 4, 101), Block(700, 1, 101)]
    assert tokens_of(blocks) == 5000
    assert more_keys_of(blocks) == 12_000  # one sample alone reads its prompt where it lies
    assert long_prompts(room._replace(tokens=5300)) == [*[Block(1000, 4, 101)] * 3, Block(1000, 1, 101)]


def test_short_prompts_leave_their_room_to_responses():
    room = Room(tokens=1000, groups=10, n=4, prompt=500, response=101)
    assert short_prompts(room) == [Block(34, 4, 101), Block(33, 4, 101), Block(33, 1, 101)]
    assert tokens_of(short_prompts(room)) == 1000


@pytest.mark.parametrize("make", [long_prompts, short_prompts])
def test_a_small_mini_batch_is_one_pass_of_full_length(make):
    blocks = make(Room(tokens=10_000, groups=2, n=2, prompt=500, response=101))
    assert blocks == [Block(500, 2, 101), Block(500, 2, 101)]


@pytest.mark.parametrize("make", [long_prompts, short_prompts])
def test_sequences_are_counted_where_there_is_a_limit(make):
    room = Room(tokens=3000, groups=8, n=4, prompt=500, response=101, sequences=2)
    assert make(room) == [Block(500, 2, 101)]
    alone = make(room._replace(response=1, sequences=None))  # nothing of such a response is fed
    assert sum(block.samples for block in alone) == (24 if make is long_prompts else 32)


@pytest.mark.parametrize("make", [long_prompts, short_prompts])
@pytest.mark.parametrize("tokens", [1600, 2048, 5000, 16_384])
def test_runs_can_pack_them_into_one_pass(make, tokens):
    room = Room(tokens=tokens, groups=40, n=8, prompt=1000, response=101)
    blocks = make(room)
    groups = [place for place, block in enumerate(blocks) for _ in range(block.samples)]
    prompts, lengths = [block.prompt for block in blocks], [101] * len(groups)
    limits = Limits(max_tokens=tokens)
    assert len(pack(prompts, groups, lengths, range(len(groups)), limits)) == 1
    assert tokens - 101 < tokens_of(blocks) <= tokens
    # No sample more would fit behind prompts of that kind.
    assert make is long_prompts or tokens_of(blocks) == tokens


def test_many_prompts_are_groups_of_which_a_pass_holds_a_part():
    room = Room(tokens=8091, groups=5, n=8, prompt=512, response=2048)
    assert long_prompts(room) == [Block(512, 3, 2048)]
    assert many_prompts(room, 3) == [Block(512, 1, 2048)] * 3
    # The two leave room for shorter responses of a fourth sample.
    assert worst_mixes(room)[2:] == [[Block(512, 4, 1895)], [Block(3, 4, 2023)]]
    assert many_prompts(room._replace(groups=2), 3) == [Block(512, 2, 2048), Block(512, 1, 2048)]
    # Two sequences at a time are of two groups, where both have lost the rest.
    assert worst_mixes(room._replace(sequences=2))[2:] == [[Block(512, 1, 2048)] * 2] * 2


@given(
    groups=st.integers(2, 24),
    n=st.sampled_from([2, 4, 8, 16]),
    prompt=st.sampled_from([64, 128, 512]),
    response=st.sampled_from([128, 512, 2048]),
    share=st.floats(0, 3),
    sequences=st.none() | st.integers(1, 20),
    shortest=st.sampled_from([0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_no_pass_is_fuller_than_the_worst_mix(groups, n, prompt, response, share, sequences, shortest, seed):
    tokens = prompt + response + int(share * n * response)
    room = Room(tokens=tokens, groups=groups, n=n, prompt=prompt, response=response, sequences=sequences)
    members, chance = [group for group in range(groups) for _ in range(n)], random.Random(seed)
    lengths = [chance.randint(int(shortest * response), response) for _ in members]
    limits = Limits(max_tokens=tokens, max_sequences=sequences)
    passes = pack([prompt] * groups, members, lengths, range(len(members)), limits)
    fed = [sum(prompt + sum(lengths[i] - 1 for i in block.samples) for block in blocks) for blocks in passes]
    assert max(fed) <= MORE_TOKENS * max(map(tokens_of, worst_mixes(room)))
