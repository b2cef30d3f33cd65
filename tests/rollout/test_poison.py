"""Memory that nobody has written is never read: every new tensor and every page that is given back holds NaN."""

from contextlib import contextmanager

import pytest
import torch

from experience_samples import load, tokens
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling

PLAIN, TRUNCATED = Sampling(max_tokens=36), Sampling(max_tokens=36, top_p=0.9, top_k=12, keep_supports=True)


@contextmanager
def poisoned_tensors():
    """`torch.empty` gives NaN, and the largest number for integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def poison_free_pages(engine):
    """From now on a page is NaN as soon as its last user has left it."""
    pages, give_back = engine.pages, engine.pages.give_back
    pages.arena.fill_(float("nan"))

    def poison(given):
        give_back(given)
        pages.arena[:, :, pages._free] = float("nan")

    pages.give_back = poison


@pytest.mark.parametrize(
    ("architecture", "sampling"),
    [("llama", PLAIN), ("llama", TRUNCATED), ("mistral", PLAIN), ("gemma2", PLAIN)],
    ids=["llama", "truncated", "mistral", "gemma2"],
)
def test_nothing_unwritten_is_read(tiny_architecture, architecture, sampling):
    generator = torch.Generator().manual_seed(2)
    requests = [GroupRequest(prompt=tokens(generator, n), seeds=(n, n + 1, n + 2)) for n in (3, 16, 21)]
    model = load(tiny_architecture(architecture), "float32")
    want = Engine(model, slots=9, max_length=60).generate(requests, sampling)
    # With room for all, with few rows, and with so little memory that samples make room and are prefilled again.
    for given in ({"slots": 9}, {"slots": 4, "window": 5}, {"slots": 9, "window": 3, "cache_tokens": 16 * 7}):
        with poisoned_tensors():
            engine = Engine(model, max_length=60, **given)
            poison_free_pages(engine)
            got = engine.generate(requests, sampling)
        assert [sample.token_ids for sample in got] == [sample.token_ids for sample in want], given
        for one, other in zip(got, want, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-6)
