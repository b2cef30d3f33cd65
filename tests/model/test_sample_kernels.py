"""The race in two rounds: its noise to the bit, its distribution, and what a draw may not depend on."""

import math

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.model.kernels import sample
from ullage.model.kernels.sample import gumbel, noise_bits, row_keys, sample_fused, sample_plain

INF = float("inf")
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
    """The definition on Python integers; a block is a negative number."""
    key = splitmix(seed, position)
    state = mixed((token + key) & 0xFFFFFFFF, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35))
    return mixed((state + (key >> 32)) & 0xFFFFFFFF, (16, 15, 15), (0x21F0AAAD, 0xD35A2D97))


def noise_of(seed, position, number):
    return -math.log(-math.log1p(-(bits_of(seed, position, number) + 0.5) / 2**32))


def race(x, seed, position, block):
    """The definition on Python floats: the token, and the block that won the first round."""
    blocks = [x[start : start + block] for start in range(0, len(x), block)]
    scores = [math.log(math.fsum(map(math.exp, of))) + noise_of(seed, position, -1 - b) for b, of in enumerate(blocks)]
    winner = scores.index(max(scores))
    first = winner * block
    scores = [value + noise_of(seed, position, first + i) for i, value in enumerate(blocks[winner])]
    return first + scores.index(max(scores)), winner


def ids(count):
    return torch.arange(count, dtype=torch.int32)


def bits(rows, vocabulary, seed=0):
    """[rows, V] unsigned, as float64: rows are positions of one seed."""
    keys = row_keys(torch.full((rows,), seed), torch.arange(rows))
    return noise_bits(keys, ids(vocabulary)).double() % 2.0**32


def excess(counts, expected):
    """How many standard deviations a chi-square statistic lies above its mean."""
    counts = counts.double()
    freedom = counts.numel() - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


def chi_square(counts, probabilities):
    expected = probabilities.double() * counts.sum()
    return ((counts - expected) ** 2 / expected).sum().item()


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
    got = noise_bits(row_keys(torch.tensor(seeds), torch.tensor(positions)), ids(300) - 150)
    for row, seed, position in zip(got.tolist(), seeds, positions, strict=True):
        want = [bits_of(seed & MASK, position, number) for number in range(-150, 150)]
        assert [value & 0xFFFFFFFF for value in row] == want


def test_gumbel_is_finite_and_exact_at_both_ends():
    ends = torch.tensor([0, -1, 1 << 30], dtype=torch.int32)  # the smallest, the largest and a quarter
    want = [-math.log(-math.log1p(-(2**-33))), -math.log(33 * math.log(2)), -math.log(-math.log(0.75 - 2**-33))]
    assert gumbel(ends).tolist() == pytest.approx(want, rel=1e-12)


def test_a_row_has_no_number_twice():
    keys = row_keys(torch.tensor([0]), torch.tensor([0]))
    assert noise_bits(keys, ids(200_200) - 200).unique().numel() == 200_200, "of tokens and blocks"


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
    numbers = noise_bits(row_keys(seeds, torch.full_like(seeds, 7)), ids(20_000)) >> 28
    pairs = torch.bincount(((numbers[:-1] + 8) * 16 + numbers[1:] + 8).flatten(), minlength=256)
    assert abs(excess(pairs, 40 * 20_000 / 256)) < 4


def test_every_input_bit_turns_half_of_the_output():
    base = torch.arange(2000)
    zeros = torch.zeros_like(base)

    def flips(one, other):
        changed = (one ^ other)[:, None] >> torch.arange(32, dtype=torch.int32) & 1
        return changed.double().mean(0)

    first = noise_bits(row_keys(base, zeros), ids(1))[:, 0]
    worst = [flips(first, noise_bits(row_keys(base ^ (1 << bit), zeros), ids(1))[:, 0]) for bit in range(63)]
    worst += [flips(first, noise_bits(row_keys(base, zeros + (1 << bit)), ids(1))[:, 0]) for bit in range(20)]
    row = noise_bits(row_keys(base[:1] + 9, zeros[:1]), ids(1 << 17))[0]
    some = torch.arange(2000) * 61
    worst += [flips(row[some], row[some ^ (1 << bit)]) for bit in range(17)]
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


@pytest.mark.parametrize(("vocabulary", "block"), [(10, 4), (12, 4), (7, 1024), (2500, 1024)])
def test_tokens_and_log_probs_are_those_of_the_definition(monkeypatch, vocabulary, block):
    monkeypatch.setattr(sample, "BLOCK", block)
    logits = torch.randn(40, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(vocabulary))
    seeds, positions = torch.arange(40) * 2**57, torch.arange(40) % 3
    tokens, logprobs = sample_plain(logits, torch.full((40,), 0.8, dtype=torch.float64), seeds, positions)
    winners = set()
    for row, x in enumerate((logits / 0.8).tolist()):
        token, winner = race(x, seeds[row].item(), positions[row].item(), block)
        winners.add(winner)
        assert tokens[row] == token
        want = x[token] - math.log(math.fsum(map(math.exp, x)))
        assert logprobs[row].item() == pytest.approx(want, rel=0, abs=1e-12)
    assert winners == set(range(-(-vocabulary // block))), "every block, the short one too"


@pytest.mark.parametrize("block", [1, 4, 1024])
def test_frequencies_match_probabilities(monkeypatch, block):
    """Of ids and of blocks: where a block is one id the first round decides all, where it is everything the second."""
    monkeypatch.setattr(sample, "BLOCK", block)
    probabilities = torch.tensor([0.3, 0.1, 0.05, 0.05, 0.02, 0.18, 0.0, 0.2, 0.06, 0.04])  # of four: 0.5, 0.4, 0.1
    count = 40_000
    logits = probabilities.log().expand(count, -1) * 0.7 + 3.0
    tokens, logprobs = sample_plain(
        logits, torch.full((count,), 0.7), torch.arange(count), torch.zeros(count, dtype=torch.long)
    )
    frequencies = torch.bincount(tokens, minlength=10)
    assert frequencies[6] == 0
    there = probabilities > 0
    assert chi_square(frequencies[there], probabilities[there]) < 15.51, "5 % with eight degrees of freedom"
    of_blocks = torch.bincount(tokens // 4)
    assert chi_square(of_blocks, torch.tensor([0.5, 0.4, 0.1])) < 5.99, "5 % with two"
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], rtol=0, atol=1e-6)


def test_frequencies_of_whole_blocks_and_a_short_one():
    probabilities = {0: 0.1, 700: 0.2, 1023: 0.05, 1024: 0.3, 2047: 0.05, 2048: 0.1, 2499: 0.2}
    logits = torch.full((2500,), -INF)
    logits[list(probabilities)] = torch.tensor(list(probabilities.values())).log()
    count = 4000
    tokens, _ = sample_plain(logits.expand(count, -1), torch.ones(count), torch.full((count,), 21), torch.arange(count))
    frequencies = torch.bincount(tokens, minlength=2500)[list(probabilities)]
    assert frequencies.sum() == count, "nothing else"
    wanted = torch.tensor(list(probabilities.values()))
    assert chi_square(frequencies, wanted) < 12.59, "5 % with six degrees of freedom"


@pytest.mark.parametrize("block", [1, 2, 1024])
def test_successive_draws_are_independent(monkeypatch, block):
    monkeypatch.setattr(sample, "BLOCK", block)
    rows = 20_000
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(rows, -1)
    zeros = torch.zeros(rows, dtype=torch.long)
    tokens, _ = sample_plain(logits, torch.ones(rows), zeros + 11, torch.arange(rows))
    pairs = torch.bincount(tokens[:-1] * 3 + tokens[1:], minlength=9)
    expected = torch.outer(logits[0].exp(), logits[0].exp()).flatten()
    assert chi_square(pairs, expected) < 15.51, "5 % with eight degrees of freedom"


@pytest.mark.invariant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_the_same_in_any_company_to_the_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(70, 8191, generator=generator, dtype=dtype) * 3  # more rows than a chunk holds, a short block
    seeds, positions = torch.arange(70) * 977, torch.arange(70) % 5
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.7], dtype=dtype).repeat(18)[:70]
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


@pytest.mark.parametrize("block", [1, 3, 1024])
def test_no_temperature_takes_the_first_of_the_largest_and_its_log_prob_at_one(monkeypatch, block):
    monkeypatch.setattr(sample, "BLOCK", block)
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 2.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.5]], dtype=torch.float64)
    zeros = torch.zeros(3, dtype=torch.float64)
    tokens, logprobs = sample_plain(logits, zeros, torch.tensor([5, 9, 2]), torch.tensor([0, 3, 1]))
    assert tokens.tolist() == [1, 0, 3], "not of the block with more mass"
    want = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-15)


def test_of_equal_scores_the_lowest_block_and_id_win():
    logits = torch.zeros(2, 3000)
    logits[0, [1500, 1700, 2900]] = 4
    logits[1] = -1e30  # no noise reaches it
    tokens, _ = sample_plain(logits, torch.tensor([0.0, 1.0]), torch.tensor([1, 1]), torch.tensor([0, 0]))
    assert tokens.tolist() == [1500, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_says_so_and_names_an_id(temperature):
    nan = float("nan")
    logits = torch.full((5, 2500), -INF)
    logits[1] = nan
    logits[2] = 0
    logits[2, [3, 1030]] = nan  # of two blocks: the third is left
    logits[3, 2000:2004] = torch.tensor([nan, -5.0, -INF, nan])
    logits[4, 2499] = -7
    each = torch.arange(5)
    tokens, logprobs = sample_plain(logits, torch.full((5,), temperature), each, each)
    assert tokens[:2].tolist() == [0, 0]
    assert 2048 <= tokens[2] < 2500
    assert tokens[3] < 1024, "minus infinity, like the block with a NaN, and before it"
    assert tokens[4] == 2499
    assert logprobs[:4].isnan().all()
    assert logprobs[4] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_does_not_win_in_its_own_block(temperature):
    logits = torch.tensor([[float("nan"), -INF, 1.0, float("nan")]])
    zero = torch.tensor([0])
    tokens, logprobs = sample_plain(logits, torch.tensor([temperature]), zero, zero)
    assert tokens.tolist() == [2]
    assert logprobs.isnan().all()


def test_noise_does_not_hang_on_how_arrays_lie_in_memory():
    """What vector units do to the ends of arrays must not reach a score: float64, compared at float32's precision."""
    row = noise_bits(row_keys(torch.tensor([1]), torch.tensor([2])), ids(1000))[0]
    whole = gumbel(row).float()
    for start in range(1, 17):
        assert numpy.array_equal(gumbel(row[start:]).float().numpy(), whole[start:].numpy())


def test_a_trace_sees_every_allocation_and_no_kernel():
    sizes = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.append(out.untyped_storage().nbytes())
            return out

    logits, temperature = torch.empty(3, 2500, device="meta"), torch.empty(3, device="meta")
    seeds = torch.empty(3, dtype=torch.long, device="meta")
    with Made():
        tokens, logprobs = sample_fused(logits, temperature, seeds, seeds)
    assert sizes == [3 * 8, 3 * 4, 3 * 3 * 8], "tokens, log-probs, two numbers for each of three blocks"
    assert (tokens.shape, tokens.dtype, logprobs.shape, logprobs.dtype) == ((3,), torch.int64, (3,), torch.float32)
