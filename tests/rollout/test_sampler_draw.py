"""Drawing tokens: frequencies, truncation, log-probs."""

import math

import pytest
import torch

from ullage.model.kernels.sample import gumbel, noise_bits, row_keys
from ullage.rollout.embedded import sampler
from ullage.rollout.embedded.sampler import ids_of
from ullage.rollout.sampling import Sampling


def draw(logits, seeds, positions, sampling):
    """Every row with the same settings; the logits carry the temperature already."""

    def each(value, dtype=logits.dtype):
        return torch.full((len(logits),), value, dtype=dtype)

    top_k = sampling.top_k if sampling.top_k > 0 else torch.iinfo(torch.long).max
    return sampler.draw(
        logits,
        each(0.0 if sampling.temperature == 0 else 1.0),
        each(sampling.top_p),
        each(top_k, torch.long),
        seeds,
        positions,
        truncates=sampling.truncates,
        fused=False,
    )


def test_draw_frequencies_match_probabilities():
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    count = 20_000
    logits = probabilities.log().expand(count, -1) + 3.0
    tokens, logprobs, _ = draw(logits, torch.arange(count), torch.zeros(count, dtype=torch.long), Sampling())
    expected = probabilities * count
    chi_square = ((torch.bincount(tokens, minlength=5) - expected) ** 2 / expected).sum().item()
    assert chi_square < 9.49, "5 % with four degrees of freedom"
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], rtol=0, atol=1e-12)


def test_draw_takes_the_largest_of_logit_and_noise():
    logits = torch.tensor([0.25, 0.0, 0.5, 0.25], dtype=torch.float64).log().expand(500, -1)
    seeds = torch.arange(500)
    zeros = torch.zeros_like(seeds)
    tokens, _, _ = draw(logits, seeds, zeros, Sampling())
    noise = gumbel(noise_bits(row_keys(seeds, zeros), torch.arange(4, dtype=torch.int32)))
    assert torch.equal(tokens, (logits + noise).argmax(-1))
    assert set(tokens.tolist()) == {0, 2, 3}


def test_draw_does_not_depend_on_the_rows_beside_it():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator)
    seeds, positions = torch.arange(64) + 10, torch.arange(64) % 5
    tokens, logprobs, _ = draw(logits, seeds, positions, Sampling(top_k=20, top_p=0.9))
    for i in range(64):
        alone = draw(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1], Sampling(top_k=20, top_p=0.9))
        assert (alone[0].item(), alone[1].item()) == (tokens[i].item(), logprobs[i].item())


def test_logprob_is_that_of_the_logits_given():
    logits = torch.randn(8, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 0.7
    tokens, logprobs, _ = draw(logits, torch.arange(8), torch.zeros(8, dtype=torch.long), Sampling(temperature=0.7))
    want = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-12)


def test_greedy_takes_the_largest_and_ignores_seeds():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]], dtype=torch.float64)
    greedy = Sampling(temperature=0, top_k=1)
    tokens, logprobs, support = draw(logits, torch.tensor([5, 9]), torch.tensor([0, 3]), greedy)
    assert support is None
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "remaining"),
    [
        # of 0.4, 0.3, 0.15, 0.1, 0.05
        ({"top_k": 2}, {0: 4 / 7, 1: 3 / 7}),
        ({"top_k": 5}, {0: 0.4, 1: 0.3, 2: 0.15, 3: 0.1, 4: 0.05}),
        ({"top_p": 0.39}, {0: 1.0}),
        ({"top_p": 0.41}, {0: 4 / 7, 1: 3 / 7}),
        ({"top_p": 0.84}, {0: 0.4 / 0.85, 1: 0.3 / 0.85, 2: 0.15 / 0.85}),
        # top-p counts within the top-k: 0.4 / 0.85 = 0.47 does not reach 0.5, 0.7 / 0.85 = 0.82 does
        ({"top_k": 3, "top_p": 0.5}, {0: 4 / 7, 1: 3 / 7}),
    ],
)
def test_truncation_keeps_and_renormalises(settings, remaining):
    order = torch.tensor([3, 0, 4, 1, 2])  # place of each probability, so that sorting matters
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    shuffled = torch.empty_like(probabilities)
    shuffled[order] = probabilities
    logits = shuffled.log().expand(300, -1)
    seeds = torch.arange(300)
    tokens, logprobs, support = draw(logits, seeds, torch.zeros_like(seeds), Sampling(**settings))
    want = {int(order[rank]): probability for rank, probability in remaining.items()}
    assert [set(ids.tolist()) for ids in ids_of(support)] == [set(want)] * 300
    assert set(tokens.tolist()) == set(want), "drawn often enough to see each"
    expected = torch.tensor([want[token] for token in tokens.tolist()], dtype=torch.float64)
    torch.testing.assert_close(logprobs.exp(), expected, rtol=0, atol=1e-12)


def test_truncated_draws_stay_inside_and_carry_renormalised_logprobs():
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15], dtype=torch.float64)
    seeds = torch.arange(2000)
    logits = probabilities.log().expand(2000, -1)
    tokens, logprobs, _ = draw(logits, seeds, torch.zeros_like(seeds), Sampling(top_k=2))
    assert set(tokens.tolist()) == {1, 3}
    want = torch.where(tokens == 1, math.log(4 / 7), math.log(3 / 7)).double()
    torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-7)
