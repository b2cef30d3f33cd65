"""The Triton kernels of the paged cache and of the sampler against their plain twins, under Triton's interpreter.

`make triton` runs them: Triton decides when it is imported whether it interprets.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from ullage.model.attention import Extras, masked_attention
from ullage.model.kernels import paged, sample
from ullage.model.kernels.truncate import least_kept
from ullage.rollout.embedded.sampler import kept

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [pytest.mark.triton, pytest.mark.skipif(not INTERPRETED, reason="`make triton` runs it, where Triton is")]
if INTERPRETED:
    from ullage.model.kernels import paged_triton, truncate_triton

PAGE = 16
LENGTHS = [1, 15, 16, 17, 33, 150, 0]
"""Around borders of pages (16), tiles (here 16 to 32) and segments (here 32 to 64); a slot that is empty."""
WILD = 10**6
"""The number of a page that does not exist: it may stand wherever a table is not read."""


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Many tiles and segments in a short context."""
    monkeypatch.setattr(paged_triton, "TILE_ELEMENTS", 2048)
    for module in (paged, paged_triton):
        monkeypatch.setattr(module, "LEAST_SEGMENT", 32)
        monkeypatch.setattr(module, "SEGMENTS", 3)
        monkeypatch.setattr(module, "PREFIX_SEGMENTS", 2)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Cache:
    """Sequences in shuffled pages of an arena that is NaN wherever nothing was written; some share a beginning."""

    def __init__(self, lengths, kv_heads, size, *, shared=(), width=12, dtype=torch.float32, numbers=torch.int64):
        """`shared`: (sequences, tokens they share)."""
        total = sum(-(-length // PAGE) for length in lengths) + 1
        free = torch.randperm(total, generator=torch.Generator().manual_seed(5)).tolist()
        self.arena = torch.full((2, 2, total, PAGE, kv_heads, size), float("nan"), dtype=dtype)
        self.table = torch.full((len(lengths), width), WILD, dtype=numbers)
        self.lengths = torch.tensor(lengths)
        self.starts = torch.zeros(len(lengths), dtype=torch.long)
        for row, length in enumerate(lengths):
            for i in range(-(-length // PAGE)):
                self.table[row, i] = free.pop()
        for rows, tokens in shared:
            self.starts[list(rows)] = tokens
            self.table[list(rows), : tokens // PAGE] = self.table[rows[0], : tokens // PAGE].clone()
        for row, length in enumerate(lengths):
            for t in range(length):
                seed = 1000 * row + t
                self.arena[1, :, self.table[row, t // PAGE], t % PAGE] = random(2, kv_heads, size, seed=seed).to(dtype)

    def query(self, heads):
        """Strided as a model's own."""
        return random(heads, len(self.lengths), self.arena.shape[-1], seed=9).to(self.arena.dtype).transpose(0, 1)

    def want(self, query, window=0, softcap=None, sinks=None):
        """By plain attention in float64; a table without wild numbers."""
        table = self.table.where(self.table != WILD, 0).long()
        if softcap is None and sinks is None:
            return paged.paged_attention(query.double(), self.arena.double(), 1, table, self.lengths, 0.3, window, True)
        gathered = self.arena.double()[1][:, table].flatten(2, 3)
        place = torch.arange(gathered.shape[2])
        mask = place < self.lengths[:, None]
        if window:
            mask &= place >= self.lengths[:, None] - window
        keys, values = gathered.masked_fill(~mask[None, :, :, None, None], 0).transpose(2, 3)
        extras = Extras(0.3, window, softcap, sinks)
        return masked_attention(query.double()[:, :, None], keys, values, mask[:, None, None], extras)[:, :, 0]


def assert_close(got, want, atol=2e-6):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(14, 2, 64), (2, 2, 80), (16, 1, 96), (3, 1, 128), (2, 1, 256)]
)
def test_attention_of_any_shape(heads, kv_heads, size, window):
    cache = Cache(LENGTHS, kv_heads, size)
    query = cache.query(heads)
    got = paged.fused_paged_attention(query, cache.arena, 1, cache.table, cache.lengths, 0.3, window)
    assert got.is_contiguous()
    assert_close(got, cache.want(query, window))
    assert torch.equal(got[6], torch.zeros(heads, size))


def test_attention_in_half_precision_with_narrow_numbers():
    cache = Cache(LENGTHS, 2, 64, dtype=torch.float16, numbers=torch.int32)
    query = cache.query(4)
    got = paged.fused_paged_attention(query, cache.arena, 1, cache.table, cache.lengths.int(), 0.3, 0)
    assert got.dtype == torch.float16
    assert_close(got, cache.want(query), atol=2e-3)


def test_a_sequence_gets_the_same_bits_in_any_company():
    cache = Cache(LENGTHS, 2, 64)
    query = cache.query(4)
    together = paged.fused_paged_attention(query, cache.arena, 1, cache.table, cache.lengths, 0.3, 0)
    for row in (0, 3, 5):
        one = slice(row, row + 1)
        narrow = cache.table[one, : -(-LENGTHS[row] // PAGE)]
        alone = paged.fused_paged_attention(query[one], cache.arena, 1, narrow, cache.lengths[one], 0.3, 0)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 20, 40])
def test_one_segment_needs_no_merge_and_gets_the_same_bits(monkeypatch, window, with_sinks):
    """A table of 32 tokens, the least that are worth a segment; a window that needs one segment, or two."""
    lengths = [1, 0, 17, 31, 32]
    cache = Cache(lengths, 2, 64)
    query, sinks = cache.query(4), random(4, seed=3) * 3 if with_sinks else None
    want = cache.want(query, window, sinks=sinks).nan_to_num()  # of nothing but sinks: none of it
    rest = (cache.lengths, 0.3, window, 0.0, sinks)
    several = paged.fused_paged_attention(query, cache.arena, 1, cache.table, *rest)
    monkeypatch.setattr(paged, "merge_partials", None)
    narrow = paged.fused_paged_attention(query, cache.arena, 1, cache.table[:, :2], *rest)
    assert torch.equal(narrow, several)
    assert_close(narrow, want)
    if window == 20:  # nobody sees more, however wide the table is
        assert torch.equal(paged.fused_paged_attention(query, cache.arena, 1, cache.table, *rest), several)


@pytest.mark.parametrize(("softcap", "with_sinks"), [(1.5, False), (None, True), (1.5, True)])
@pytest.mark.parametrize("window", [0, 20])
def test_soft_caps_and_sinks(softcap, with_sinks, window):
    lengths = [1, 40, 90, 80]
    cache = Cache(lengths, 2, 64, shared=[((2, 3), 48)])
    query = cache.query(4)
    sinks = random(4, seed=3) * 3 if with_sinks else None
    rest = (0.3, window, softcap or 0.0, sinks)
    want = cache.want(query, window, softcap, sinks)
    assert_close(paged.fused_paged_attention(query, cache.arena, 1, cache.table, cache.lengths, *rest), want)
    tables = (cache.table, cache.lengths, cache.starts, torch.tensor([[2, 3]]))
    assert_close(paged.grouped_paged_attention(query, cache.arena, 1, *tables, *rest), want)


GROUPED = [40, 150, 33, 65, 17, 100, 0, 64]
SHARED = [((1, 3, 5), 64), ((2, 7), 32)]


@pytest.mark.parametrize("window", [0, 20, 60])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "most_rows"), [(4, 2, 64, 128), (14, 2, 80, 16), (8, 1, 128, 16)]
)
def test_groups_read_what_they_share_once(monkeypatch, heads, kv_heads, size, most_rows, window):
    monkeypatch.setattr(paged_triton, "MOST_ROWS", most_rows)
    cache = Cache(GROUPED, kv_heads, size, shared=SHARED)
    query = cache.query(heads)
    members = torch.tensor([[1, 3, 5, -1], [-1, -1, -1, -1], [2, -1, 7, -1]])
    got = paged.grouped_paged_attention(
        query, cache.arena, 1, cache.table, cache.lengths, cache.starts, members, 0.3, window
    )
    assert_close(got, cache.want(query, window))


def test_a_member_gets_the_same_bits_whoever_its_siblings_are():
    cache = Cache(GROUPED, 2, 64, shared=SHARED)
    query = cache.query(4)

    def attend(members, starts):
        tables = (cache.table, cache.lengths, starts, torch.tensor(members))
        return paged.grouped_paged_attention(query, cache.arena, 1, *tables, 0.3, 0)

    everyone = attend([[1, 3, 5, -1], [2, 7, -1, -1]], cache.starts)
    only = torch.zeros_like(cache.starts)
    only[3] = 64
    alone = attend([[3, -1, -1, -1]], only)
    assert torch.equal(alone[3], everyone[3])
    ungrouped = paged.fused_paged_attention(query, cache.arena, 1, cache.table, cache.lengths, 0.3, 0)
    assert torch.equal(alone[[0, 4, 6]], ungrouped[[0, 4, 6]])
    # A table for 64 tokens is divided less than one for 192.
    short = [2, 7]
    shared = (cache.table[short, :4], cache.lengths[short], cache.starts[short], torch.tensor([[0, 1]]))
    assert torch.equal(paged.grouped_paged_attention(query[short], cache.arena, 1, *shared, 0.3, 0), everyone[short])


def test_what_is_shared_is_read_from_the_first_members_pages():
    """Others of the group may not even name those pages."""
    cache = Cache(GROUPED, 2, 64, shared=SHARED)
    query = cache.query(4)
    want = cache.want(query)
    cache.table[[3, 5], :4] = WILD
    members = torch.tensor([[1, 3, 5], [2, 7, -1]])
    tables = (cache.table, cache.lengths, cache.starts, members)
    assert_close(paged.grouped_paged_attention(query, cache.arena, 1, *tables, 0.3, 0), want)


def test_store_is_its_twin_and_leaves_out_negative_places():
    kept = random(2, 2, 6, PAGE, 3, 20)
    arena = kept.clone()
    key, value = random(3, 5, 20, seed=1).transpose(0, 1), random(3, 5, 40, seed=2).transpose(0, 1)[:, :, 7:27]
    places = torch.tensor([0, 95, -1, 17, -7])
    paged.fused_store_kv(arena, 1, key, value, places)
    paged.store_kv(kept, 1, key[[0, 1, 3]], value[[0, 1, 3]], places[[0, 1, 3]])
    assert torch.equal(arena, kept)


def test_operators_pass_torchs_own_checks():
    cache = Cache(GROUPED, 1, 16, shared=SHARED)
    query = cache.query(2)
    tables = (cache.table, cache.lengths, cache.starts)
    partial, sums = torch.zeros(8, 2, 5, 16), torch.zeros(2, 8, 2, 5)
    tests = ("test_schema", "test_faketensor")
    kinds = (0.3, 0, 0.0)
    members = torch.tensor([[1, 3, 5], [2, 7, -1]])
    layer = (query, cache.arena.nan_to_num(), 1)
    torch.library.opcheck(
        paged.attend_shared.registered, (*layer, *tables, members, partial, sums, 2, *kinds), test_utils=tests
    )
    torch.library.opcheck(paged.attend_own.registered, (*layer, *tables, partial, sums, 3, *kinds), test_utils=tests)
    torch.library.opcheck(paged.attend_at_once.registered, (*layer, *tables[:2], None, *kinds), test_utils=tests)
    rest = (cache.lengths, cache.starts, None, 3, 0, torch.float16)
    torch.library.opcheck(paged.merge_partials.registered, (partial, sums, *rest), test_utils=tests)
    key = random(8, 1, 16)
    torch.library.opcheck(
        paged.fused_store_kv.registered, (cache.arena.nan_to_num(), 1, key, key + 1, torch.arange(8)), test_utils=tests
    )


def draws(rows, vocabulary, seed=0):
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.6]).repeat(rows)[:rows]
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(seed))
    return random(rows, vocabulary, seed=seed) * 4, temperature, seeds, torch.arange(rows) * 37


@pytest.mark.parametrize(("vocabulary", "block"), [(1, 16), (100, 128), (1000, 256), (257, 64), (4096, 1024)])
def test_sampled_tokens_and_log_probs(monkeypatch, vocabulary, block):
    monkeypatch.setattr(sample, "BLOCK", block)
    given = draws(32, vocabulary, seed=vocabulary)
    tokens, logprobs = sample.sample_fused(*given)
    want_tokens, want_logprobs = sample.sample_plain(*given)
    assert torch.equal(tokens, want_tokens)
    torch.testing.assert_close(logprobs, want_logprobs, rtol=0, atol=3e-6)


def test_equal_and_almost_equal_logits_without_temperature(monkeypatch):
    monkeypatch.setattr(sample, "BLOCK", 64)
    logits = torch.zeros(3, 200)
    logits[0, [70, 150]] = 0.1
    logits[1, 150], logits[1, 70] = 0.1 + 8e-9, 0.1  # closer than what exponentials can tell apart
    logits[2, 199] = 5
    zeros = torch.zeros(3, dtype=torch.long)
    tokens, _ = sample.sample_fused(logits, torch.zeros(3), zeros, zeros)
    assert tokens.tolist() == [70, 150, 199]


def test_noise_that_rounds_to_one_is_finite():
    """Of seed 417, id 2356 has a number within 2^-26 of 1."""
    logits = torch.zeros(2, 2400)
    logits[:, 2356] = 50
    given = (logits, torch.tensor([0.0, 1.0]), torch.tensor([417, 417]), torch.tensor([0, 0]))
    ids = torch.tensor([2356], dtype=torch.int32)
    assert sample.noise_bits(sample.row_keys(*given[2:]), ids).tolist() == [[-57], [-57]]
    assert sample.sample_fused(*given)[0].tolist() == [2356, 2356]


def test_impossible_ids_are_never_drawn(monkeypatch):
    monkeypatch.setattr(sample, "BLOCK", 64)
    logits, temperature, seeds, positions = draws(24, 200)
    for lowest in (-1e30, -float("inf")):
        masked = torch.full_like(logits, lowest)
        masked[:, 130:140] = logits[:, 130:140]  # whole blocks have nothing else
        tokens, logprobs = sample.sample_fused(masked, temperature, seeds, positions)
        want = sample.sample_plain(masked, temperature, seeds, positions)
        assert torch.equal(tokens, want[0])
        torch.testing.assert_close(logprobs, want[1], rtol=0, atol=3e-6)


def test_a_poisoned_row_says_so_and_stays_alone(monkeypatch):
    monkeypatch.setattr(sample, "BLOCK", 64)
    given = draws(6, 200)
    want = sample.sample_fused(*given)
    given[0][2, 77] = float("nan")
    given[0][4] = float("nan")
    given[0][5] = -float("inf")
    tokens, logprobs = sample.sample_fused(*given)
    assert logprobs.isnan().tolist() == [False, False, True, False, True, True]
    assert torch.equal(tokens, sample.sample_plain(*given)[0])
    assert tokens[4:].tolist() == [0, 0], "ids that can be looked up"
    good = [0, 1, 3]
    assert torch.equal(tokens[good], want[0][good])
    assert torch.equal(logprobs[good], want[1][good])


def test_truncation_without_a_sort_keeps_the_same_ids(monkeypatch):
    monkeypatch.setattr(truncate_triton, "BLOCK", 64)
    logits = random(7, 90, seed=4) * 3
    logits[3] = -logits[3].abs()  # numbers of one sign only
    asked = [(5, 1.0), (90, 0.8), (20, 0.5), (1, 1.0), (2**63 - 1, 1.0), (89, 0.999), (40, 0.01)]
    top_k, top_p = (torch.tensor(each) for each in zip(*asked, strict=True))
    least = least_kept(logits, top_k, top_p)
    for row, (k, p) in enumerate(asked):
        want = kept(logits[row : row + 1], torch.tensor([[p]]), torch.tensor([[k]]))[0]
        assert torch.equal(logits[row] >= least[row], want)
    assert least[4] == -float("inf")


def test_truncation_keeps_all_of_equals(monkeypatch):
    monkeypatch.setattr(truncate_triton, "BLOCK", 64)
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, -1.0]])
    assert least_kept(logits, torch.tensor([2]), torch.tensor([1.0])).item() == 1.0
