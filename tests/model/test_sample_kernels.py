"""Gumbel-max with counted noise: exact bits, distribution, independence, and what a draw may not depend on."""

import math

import numpy
import pytest
import torch

from ullage.model.kernels.sample import gumbel, noise_bits, row_keys, sample_fused, sample_plain

MASK = (1 << 64) - 1


def splitmix(seed, position):
    """The published mixer on Python integers."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def mixed(state, shifts, factors):
    state ^= state >> shifts[0]
    for factor, bits in zip(factors, shifts[1:], strict=True):
        state = state * factor & 0xFFFFFFFF
        state ^= state >> bits
    return state


def bits_of(seed, position, token):
    """The definition on Python integers."""
    key = splitmix(seed, position)
    state = mixed((token + key) & 0xFFFFFFFF, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35))
    return mixed((state + (key >> 32)) & 0xFFFFFFFF, (16, 15, 15), (0x21F0AAAD, 0xD35A2D97))


def bits(rows, vocabulary, seed=0):
    """[rows, V] unsigned, as float64: rows are positions of one seed."""
    keys = row_keys(torch.full((rows,), seed), torch.arange(rows))
    return noise_bits(keys, vocabulary).double() % 2.0**32


def excess(counts, expected):
    """How many standard deviations a chi-square statistic lies above its mean."""
    counts = counts.double()
    freedom = counts.numel() - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


def test_keys_are_splitmix64():
    # Seed 0: 0xE220A8397B1DCDAF and 0x6E789E6AA1B965F4 are the first outputs of the reference implementation.
    low, high = row_keys(torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert [value & 0xFFFFFFFF for value in low.tolist()] == [0x7B1DCDAF, 0xA1B965F4]
    assert [value & 0xFFFFFFFF for value in high.tolist()] == [0xE220A839, 0x6E789E6A]


def test_the_first_mixer_is_murmurs():
    # MurmurHash3's finaliser of 1 and of 0xFFFFFFFF, from its reference implementation.
    assert mixed(1, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35)) == 0x514E28B7
    assert mixed(0xFFFFFFFF, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35)) == 0x81F16F39


def test_bits_equal_integer_arithmetic():
    seeds = [0, 1, 2**31, 2**62 + 12345, 2**63 - 1, -5]
    positions = [0, 1, 511, 32768, 10**6, 3]
    got = noise_bits(row_keys(torch.tensor(seeds), torch.tensor(positions)), 300)
    for row, seed, position in zip(got.tolist(), seeds, positions, strict=True):
        assert [value & 0xFFFFFFFF for value in row] == [bits_of(seed & MASK, position, token) for token in range(300)]


def test_gumbel_is_finite_and_exact_at_both_ends():
    ends = torch.tensor([0, -1, 1 << 30], dtype=torch.int32)  # the smallest, the largest and a quarter
    want = [-math.log(-math.log1p(-(2**-33))), -math.log(33 * math.log(2)), -math.log(-math.log(0.75 - 2**-33))]
    assert gumbel(ends).tolist() == pytest.approx(want, rel=1e-12)


def test_a_row_has_no_number_twice():
    assert bits(1, 200_000)[0].unique().numel() == 200_000


def test_neighbours_in_id_and_position_are_independent():
    numbers = (bits(40, 20_000) / 2**28).long()  # sixteen classes
    for one, other in (
        (numbers[:, :-1], numbers[:, 1:]),
        (numbers[:-1], numbers[1:]),
        (numbers[:, :-64], numbers[:, 64:]),
    ):
        pairs = torch.bincount((one * 16 + other).flatten(), minlength=256)
        assert abs(excess(pairs, one.numel() / 256)) < 4


def test_neighbouring_seeds_are_independent():
    seeds = torch.arange(41)
    numbers = noise_bits(row_keys(seeds, torch.full_like(seeds, 7)), 20_000) >> 28
    pairs = torch.bincount(((numbers[:-1] + 8) * 16 + numbers[1:] + 8).flatten(), minlength=256)
    assert abs(excess(pairs, 40 * 20_000 / 256)) < 4


def test_every_input_bit_turns_half_of_the_output():
    base = torch.arange(2000)
    zeros = torch.zeros_like(base)

    def flips(one, other):
        changed = (one ^ other)[:, None] >> torch.arange(32, dtype=torch.int32) & 1
        return changed.double().mean(0)

    first = noise_bits(row_keys(base, zeros), 1)[:, 0]
    worst = [flips(first, noise_bits(row_keys(base ^ (1 << bit), zeros), 1)[:, 0]) for bit in range(63)]
    worst += [flips(first, noise_bits(row_keys(base, zeros + (1 << bit)), 1)[:, 0]) for bit in range(20)]
    row = noise_bits(row_keys(base[:1] + 9, zeros[:1]), 1 << 17)[0]
    ids = torch.arange(2000) * 61
    worst += [flips(row[ids], row[ids ^ (1 << bit)]) for bit in range(17)]
    assert (torch.stack(worst) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(2000)


def test_the_winner_of_equal_logits_is_any_id():
    """Chi-square of where the winner lies, by its high bits and by its low bits; and how much it wins by."""
    rows, vocabulary = 4096, 1024
    numbers = bits(rows, vocabulary, seed=3)
    tokens = numbers.argmin(-1)
    assert abs(excess(torch.bincount(tokens // 16, minlength=64), rows / 64)) < 3
    assert abs(excess(torch.bincount(tokens % 64, minlength=64), rows / 64)) < 3
    assert numbers.amin(-1).mean().item() * (vocabulary + 1) / 2**32 == pytest.approx(1, abs=3 / math.sqrt(rows))
    flat = torch.zeros(rows, vocabulary)
    drawn, _ = sample_plain(flat, torch.ones(rows), torch.full((rows,), 3), torch.arange(rows))
    assert torch.equal(drawn, tokens)


def test_frequencies_match_probabilities():
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05, 0.0])
    count = 20_000
    logits = probabilities.log().expand(count, -1) * 0.7 + 3.0
    tokens, logprobs = sample_plain(
        logits, torch.full((count,), 0.7), torch.arange(count), torch.zeros(count, dtype=torch.long)
    )
    frequencies = torch.bincount(tokens, minlength=6)
    assert frequencies[5] == 0
    expected = probabilities[:5] * count
    assert ((frequencies[:5] - expected) ** 2 / expected).sum().item() < 9.49, "5 % with four degrees of freedom"
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], rtol=0, atol=1e-6)


def test_successive_draws_are_independent():
    rows = 20_000
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(rows, -1)
    zeros = torch.zeros(rows, dtype=torch.long)
    tokens, _ = sample_plain(logits, torch.ones(rows), zeros + 11, torch.arange(rows))
    expected = torch.outer(logits[0].exp(), logits[0].exp()).flatten() * (rows - 1)
    pairs = torch.bincount(tokens[:-1] * 3 + tokens[1:], minlength=9)
    assert ((pairs - expected) ** 2 / expected).sum().item() < 15.5, "5 % with eight degrees of freedom"


@pytest.mark.invariant
def test_a_row_is_the_same_in_any_company_to_the_bit():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(70, 8191, generator=generator) * 3  # more rows than a chunk holds, an odd vocabulary
    seeds, positions = torch.arange(70) * 977, torch.arange(70) % 5
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.7]).repeat(18)[:70]
    tokens, logprobs = sample_plain(logits, temperature, seeds, positions)
    order = torch.randperm(70, generator=generator)
    moved = sample_plain(logits[order], temperature[order], seeds[order], positions[order])
    assert torch.equal(moved[0], tokens[order])
    assert torch.equal(moved[1], logprobs[order])
    for i in range(0, 70, 9):
        alone = sample_plain(logits[i : i + 1], temperature[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
        assert (alone[0].item(), alone[1].item()) == (tokens[i].item(), logprobs[i].item())


def test_a_temperature_of_each_row_is_that_of_a_number():
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(1))
    seeds, positions = torch.arange(9), torch.arange(9)
    divided = sample_plain(logits / 0.7, torch.ones(9), seeds, positions)
    given = sample_plain(logits, torch.full((9,), 0.7), seeds, positions)
    assert torch.equal(divided[0], given[0])
    assert torch.equal(divided[1], given[1])


def test_no_temperature_takes_the_first_of_the_largest_and_its_log_prob_at_one():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 2.0, 1.0, 0.0]])
    tokens, logprobs = sample_plain(logits, torch.zeros(2), torch.tensor([5, 9]), torch.tensor([0, 3]))
    assert tokens.tolist() == [1, 0]
    assert torch.equal(logprobs, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1))


def test_noise_does_not_hang_on_how_arrays_lie_in_memory():
    """What vector units do to the ends of arrays must not reach a score: float64, compared at float32's precision."""
    row = noise_bits(row_keys(torch.tensor([1]), torch.tensor([2])), 1000)[0]
    whole = gumbel(row).float()
    for start in range(1, 17):
        assert numpy.array_equal(gumbel(row[start:]).float().numpy(), whole[start:].numpy())


def test_the_fused_operator_says_shapes_without_a_kernel():
    tokens, logprobs = sample_fused(
        torch.empty(3, 100, device="meta"),
        torch.empty(3, device="meta"),
        torch.empty(3, dtype=torch.long, device="meta"),
        torch.empty(3, dtype=torch.long, device="meta"),
    )
    assert (tokens.shape, tokens.dtype, logprobs.shape, logprobs.dtype) == ((3,), torch.int64, (3,), torch.float32)
