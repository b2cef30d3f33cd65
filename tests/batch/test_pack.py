"""Packing: hard limits, every sample once, groups kept together, and a refusal where one sequence is too long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.base.errors import ConfigError
from ullage.batch.pack import Block, Limits, pack


def tokens_of(block, prompt_lengths, response_lengths):
    return prompt_lengths[block.prompt] + sum(response_lengths[i] - 1 for i in block.samples)


@st.composite
def batches(draw):
    prompt_lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    count = draw(st.integers(0, 24))
    groups = draw(st.lists(st.integers(0, len(prompt_lengths) - 1), min_size=count, max_size=count))
    response_lengths = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    samples = [i for i in range(count) if draw(st.booleans())]
    longest = max((prompt_lengths[groups[i]] + response_lengths[i] - 1 for i in samples), default=1)
    limits = Limits(
        max_tokens=longest + draw(st.integers(0, 100)),
        max_sequences=draw(st.none() | st.integers(1, 9)),
        share_prefix=draw(st.booleans()),
    )
    return prompt_lengths, groups, response_lengths, samples, limits


@given(batches())
@settings(max_examples=300, deadline=None)
def test_limits_hold_and_every_sample_is_packed_once(batch):
    prompt_lengths, groups, response_lengths, samples, limits = batch
    micro_batches = pack(prompt_lengths, groups, response_lengths, samples, limits)
    packed = []
    for blocks in micro_batches:
        assert sum(tokens_of(block, prompt_lengths, response_lengths) for block in blocks) <= limits.max_tokens
        assert sum(len(block.samples) for block in blocks) <= (limits.max_sequences or len(samples))
        for block in blocks:
            assert {groups[i] for i in block.samples} == {block.prompt}
            assert limits.share_prefix or len(block.samples) == 1
            packed.extend(block.samples)
    assert sorted(packed) == samples
    assert pack(prompt_lengths, groups, response_lengths, samples, limits) == micro_batches


@given(batches())
@settings(max_examples=100, deadline=None)
def test_sharing_keeps_a_group_in_one_block_where_it_fits(batch):
    prompt_lengths, groups, response_lengths, samples, _ = batch
    micro_batches = pack(prompt_lengths, groups, response_lengths, samples, Limits(max_tokens=10_000))
    assert len(micro_batches) == (1 if samples else 0)
    blocks = [block for blocks in micro_batches for block in blocks]
    want = {Block(g, tuple(i for i in samples if groups[i] == g)) for g in {groups[i] for i in samples}}
    assert set(blocks) == want
    assert len(blocks) == len(want)


@given(batches())
@settings(max_examples=100, deadline=None)
def test_no_two_micro_batches_could_have_been_one(batch):
    prompt_lengths, groups, response_lengths, samples, limits = batch
    limits = Limits(max_tokens=limits.max_tokens, share_prefix=limits.share_prefix)
    sizes = [
        sum(tokens_of(block, prompt_lengths, response_lengths) for block in blocks)
        for blocks in pack(prompt_lengths, groups, response_lengths, samples, limits)
    ]
    for i, size in enumerate(sizes):
        assert all(size + other > limits.max_tokens for other in sizes[i + 1 :])


def test_by_hand():
    # Blocks of 10 + 4 + 4 = 18 and 3 + 2 = 5 tokens; the last token of a response is never fed.
    got = pack([10, 3], [0, 0, 1], [5, 5, 3], [0, 1, 2], Limits(max_tokens=23))
    assert got == [[Block(0, (0, 1)), Block(1, (2,))]]
    got = pack([10, 3], [0, 0, 1], [5, 5, 3], [0, 1, 2], Limits(max_tokens=22))
    assert got == [[Block(0, (0, 1))], [Block(1, (2,))]]
    got = pack([10, 3], [0, 0, 1], [5, 5, 3], [0, 1, 2], Limits(max_tokens=19, share_prefix=False))
    assert got == [[Block(0, (0,)), Block(1, (2,))], [Block(0, (1,))]]


def test_a_group_is_cut_where_that_saves_a_micro_batch_and_feeds_few_prompts_twice():
    # Three groups of 1 + 4 x 10 tokens: whole they need a micro-batch each; with one of them cut, two.
    groups = [0] * 4 + [1] * 4 + [2] * 4
    got = pack([1] * 3, groups, [11] * 12, list(range(12)), Limits(max_tokens=62))
    assert got == [[Block(0, (0, 1, 2, 3)), Block(1, (4, 5))], [Block(2, (8, 9, 10, 11)), Block(1, (6, 7))]]
    # With a prompt of 10 tokens, once more is 160 instead of 150: too many.
    got = pack([10] * 3, groups, [11] * 12, list(range(12)), Limits(max_tokens=80))
    assert [[block.prompt for block in blocks] for blocks in got] == [[0], [1], [2]]


def test_a_response_of_one_token_costs_nothing_beside_its_prompt():
    assert pack([5], [0, 0], [1, 1], [0, 1], Limits(max_tokens=5)) == [[Block(0, (0, 1))]]


def test_nothing():
    assert pack([3], [], [], [], Limits(max_tokens=1)) == []


def test_a_sequence_over_the_limit_is_refused_with_the_lever():
    pack([10], [0], [7], [0], Limits(max_tokens=16))
    with pytest.raises(ConfigError, match="a sequence of 17 tokens does not fit one pass of 16 tokens") as caught:
        pack([10], [0], [8], [0], Limits(max_tokens=16))
    assert "ppo_max_token_len_per_gpu" in caught.value.remedy


def test_micro_batches_are_filled_evenly():
    # First fit would make 10, 10 and 2; three of them hold 8, 7 and 7 as well.
    lengths = [5, 5, 5, 3, 2, 2]
    got = pack(lengths, list(range(6)), [1] * 6, list(range(6)), Limits(max_tokens=10))
    assert [sum(lengths[block.prompt] for block in blocks) for blocks in got] == [8, 7, 7]


def test_where_even_filling_would_break_the_limit_first_fit_stands():
    # The emptiest first: 3, 2 and 3, 2 leave no room for the last 2.
    lengths = [3, 3, 2, 2, 2]
    got = pack(lengths, list(range(5)), [1] * 5, list(range(5)), Limits(max_tokens=6))
    assert [[lengths[block.prompt] for block in blocks] for blocks in got] == [[3, 3], [2, 2, 2]]
