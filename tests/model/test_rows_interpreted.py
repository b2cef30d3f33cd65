"""The Triton kernels around a step against their plain twins, under Triton's interpreter (`make triton`)."""

import os
from importlib.util import find_spec

import pytest
import torch

from ullage.rollout.embedded import bookkeeping
from ullage.rollout.embedded.state import Row, SlotState
from ullage.rollout.sampling import Sampling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [pytest.mark.triton, pytest.mark.skipif(not INTERPRETED, reason="`make triton` runs it, where Triton is")]

ROWS = 150
"""More than a program has."""
VOCABULARY = 50
STOPS = (2, 17, 40)


def make_state():
    """Samples around borders of pages and near their limits, some of which have ended."""
    state = SlotState(ROWS + 10, pages=6, window=3, stop_ids=STOPS, dtype=torch.float32, device=torch.device("cpu"))
    state.place(
        0,
        [
            Row(
                pages=[(7 * i + j) % 997 for j in range(6)],
                length=1 + i % 80,
                last=i % VOCABULARY,
                drawn=1 + i % 4,
                limit=2 + i % 5,
                seed=i,
                sampling=Sampling(ignore_eos=i % 3 == 0),
            )
            for i in range(ROWS)
        ],
    )
    state.rows(0, ROWS).running[::7] = 0
    return state


def test_where_new_tokens_go():
    rows = make_state().rows(0, ROWS)
    want = bookkeeping.feed_plain(rows, scratch=10**6)
    got = bookkeeping.feed_fused(rows)
    running = rows.running.bool()
    assert torch.equal(got.places[running], want.places[running])
    assert torch.equal(got.lengths[running], want.lengths[running])
    assert set(got.places[~running].tolist()) == {-1}
    assert set(got.lengths[~running].tolist()) == {0}
    assert (got.places.dtype, got.lengths.dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize("column", [0, 2])
def test_what_follows_from_what_was_drawn(column):
    generator = torch.Generator().manual_seed(column)
    tokens = torch.randint(-3, VOCABULARY + 3, (ROWS,), generator=generator)
    tokens[::4] = torch.tensor(STOPS).repeat(ROWS)[: len(tokens[::4])]
    logprobs = torch.randn(ROWS, generator=generator)
    logprobs[5] = float("nan")
    states = [make_state(), make_state()]
    for state, note in zip(states, (bookkeeping.note_plain, bookkeeping.note_fused), strict=True):
        note(state.rows(0, ROWS), tokens, logprobs, torch.tensor([column]), VOCABULARY)
    want, got = (state.rows(0, ROWS + 10) for state in states)
    for name in ("running", "last", "drawn", "tokens", "limit", "length", "seed", "page_table"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=0, atol=0, equal_nan=True)
    before = make_state().rows(0, ROWS).running.sum()
    assert 0 < got.running.sum() < before, "some end and some go on"
