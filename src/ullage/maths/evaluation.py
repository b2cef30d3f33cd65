"""What n scored responses to one prompt say about a user who draws k of them; exact, no tensors, no random numbers.

Every estimate is the mean over all subsets of k of the n responses, so it is unbiased. Average over prompts afterwards.
"""

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction
from functools import lru_cache


def mean_at(scores: Sequence[float]) -> float:
    """mean@n: the score of one response."""
    return math.fsum(scores) / len(scores)


def pass_at(num_samples: int, num_correct: int, k: int) -> float:
    """pass@k: probability that at least one of k is correct, 1 - C(n-c, k) / C(n, k) (arXiv:2107.03374 eq. 1)."""
    _check(num_samples, k)
    return float(1 - Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k)))


def best_at(scores: Sequence[float], k: int) -> float:
    """best@k: the expected highest score of k, sum over ranks i of C(i-1, k-1) / C(n, k) times the i-th lowest."""
    _check(len(scores), k)
    subsets = math.comb(len(scores), k)
    return math.fsum(math.comb(i, k - 1) / subsets * score for i, score in enumerate(sorted(scores)))


def majority_at(answers: Sequence[Hashable], scores: Sequence[float], k: int) -> float:
    """maj@k: the expected score of the most frequent answer of k; answers that tie share the vote.

    Sharing is what taking the first of a tie gives on average. An answer's score is the mean of its responses' scores.
    """
    _check(len(answers), k)
    scores_of: dict[Hashable, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        scores_of.setdefault(answer, []).append(score)
    sizes = tuple(sorted(len(group) for group in scores_of.values()))
    means = [(len(group), mean_at(group)) for group in scores_of.values()]
    # Wrong answers are most of them and add nothing.
    return math.fsum(_chance_to_win(size, sizes, k) * mean for size, mean in means if mean)


def _check(num_samples: int, k: int) -> None:
    assert 1 <= k <= num_samples, f"k = {k} of {num_samples} responses"


@lru_cache(maxsize=4096)
def _chance_to_win(size: int, sizes: tuple[int, ...], k: int) -> float:
    """How often an answer given by `size` of the n responses wins among k of them; `sizes` are those of all answers."""
    others = list(sizes)
    others.remove(size)
    wins = sum(
        math.comb(size, votes) * _ways_not_to_lose(others, votes, k - votes) for votes in range(1, min(size, k) + 1)
    )
    return float(wins / math.comb(sum(sizes), k))


def _ways_not_to_lose(others: Sequence[int], votes: int, rest: int) -> Fraction:
    """Ways to draw `rest` responses with no other answer above `votes`; one with t others at `votes` counts 1/(t+1)."""
    ways = {(0, 0): 1}  # (responses drawn, answers that tie) -> number of ways
    for size in others:
        longer: dict[tuple[int, int], int] = {}
        for (drawn, ties), number in ways.items():
            for taken in range(min(size, votes, rest - drawn) + 1):
                state = (drawn + taken, ties + (taken == votes))
                longer[state] = longer.get(state, 0) + number * math.comb(size, taken)
        ways = longer
    return sum((Fraction(number, ties + 1) for (drawn, ties), number in ways.items() if drawn == rest), Fraction(0))
