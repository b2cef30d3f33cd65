"""The custom ops of the paged cache: torch's own checks, and values against plain attention."""

import pytest
import torch

from ullage.model.kernels.paged import (
    LEAST_SEGMENT,
    PREFIX_SEGMENTS,
    SEGMENTS,
    fused_paged_attention,
    fused_store_kv,
    grouped_paged_attention,
    paged_attention,
    store_kv,
)
from ullage.run.trace import record

LAYERS, PAGES, PAGE_SIZE, KV_HEADS, HEADS, SIZE = 2, 6, 4, 2, 4, 8


def make_arena(dtype=torch.float32):
    shape = (LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, SIZE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_store_kv_passes_opcheck():
    key, value = random(3, KV_HEADS, SIZE), random(3, KV_HEADS, SIZE) + 1
    torch.library.opcheck(store_kv.registered, (make_arena(), 1, key, value, torch.tensor([0, 7, 22])))


@pytest.mark.parametrize(("window", "wide"), [(0, False), (3, False), (0, True)])
def test_paged_attention_passes_opcheck(window, wide):
    table, lengths = torch.tensor([[3, 0], [5, 1], [2, 4]]), torch.tensor([5, 8, 1])
    arguments = (random(3, HEADS, SIZE), make_arena(), 1, table, lengths, 0.3, window, wide)
    torch.library.opcheck(paged_attention.registered, arguments)


def test_store_kv_writes_its_places_and_nothing_else():
    arena = make_arena()
    before = arena.clone()
    key, value = random(2, KV_HEADS, SIZE), random(2, KV_HEADS, SIZE) + 1
    store_kv(arena, 1, key, value, torch.tensor([6, 23]))
    assert torch.equal(arena[1, 0, 1, 2], key[0])
    assert torch.equal(arena[1, 1, 1, 2], value[0])
    assert torch.equal(arena[1, 0, 5, 3], key[1])
    assert torch.equal(arena[1, 1, 5, 3], value[1])
    arena[1, :, 1, 2] = before[1, :, 1, 2]
    arena[1, :, 5, 3] = before[1, :, 5, 3]
    assert torch.equal(arena, before)


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize(("dtype", "wide"), [(torch.float64, False), (torch.float32, True)])
def test_paged_attention_by_hand(window, dtype, wide):
    arena = make_arena(dtype)
    query = random(3, HEADS, SIZE, dtype=dtype)
    table, lengths = torch.tensor([[3, 0], [5, 1], [2, 4]]), [5, 8, 1]
    got = paged_attention(query, arena, 1, table, torch.tensor(lengths), 0.3, window, wide)
    assert got.dtype == dtype
    for row, length in enumerate(lengths):
        first = max(0, length - window) if window else 0
        places = [(table[row, i // PAGE_SIZE], i % PAGE_SIZE) for i in range(first, length)]
        for head in range(HEADS):
            keys, values = (
                torch.stack([arena[1, side, page, offset, head // 2] for page, offset in places]).double()
                for side in (0, 1)
            )
            scores = (keys @ query[row, head].double() * 0.3).softmax(0)
            want = (scores @ values).to(dtype)
            torch.testing.assert_close(got[row, head], want, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("window", [0, 3])
def test_what_was_not_written_is_not_read(window):
    """Poison behind the end of every sequence, before its window and in every other page; lengths at page borders."""
    arena, query = make_arena(), random(4, HEADS, SIZE)
    table, lengths = torch.tensor([[3, 0], [5, 1], [2, 4], [2, 4]]), torch.tensor([4, 5, 8, 0])
    want = paged_attention(query, arena, 1, table, lengths, 0.3, window, True)
    poisoned = torch.full_like(arena, float("nan"))
    for row, length in enumerate(lengths.tolist()):
        for i in range(max(0, length - window) if window else 0, length):
            place = (1, slice(None), table[row, i // PAGE_SIZE], i % PAGE_SIZE)
            poisoned[place] = arena[place]
    got = paged_attention(query, poisoned, 1, table, lengths, 0.3, window, True)
    assert torch.equal(got, want)
    assert torch.equal(got[3], torch.zeros(HEADS, SIZE))


@pytest.mark.invariant
def test_a_wider_table_and_other_rows_change_no_bit():
    arena, query = make_arena(), random(3, HEADS, SIZE)
    table, lengths = torch.tensor([[3, 0], [5, 1], [2, 4]]), torch.tensor([3, 8, 5])
    together = paged_attention(query, arena, 1, table, lengths, 0.3, 0, True)
    for row, pages in enumerate((1, 2, 2)):
        one = slice(row, row + 1)
        alone = paged_attention(query[one], arena, 1, table[one, :pages], lengths[one], 0.3, 0, True)
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize(
    ("grouped", "tokens", "segments"),
    [
        (False, 3 * LEAST_SEGMENT, 3),
        (False, 3 * LEAST_SEGMENT + 1, 4),
        (False, 99 * LEAST_SEGMENT, SEGMENTS),
        (True, 3, 2),
        (True, 10 * LEAST_SEGMENT, PREFIX_SEGMENTS + 10),
        (True, 99 * LEAST_SEGMENT, PREFIX_SEGMENTS + SEGMENTS),
    ],
)
def test_a_trace_sees_what_fused_attention_holds(grouped, tokens, segments):
    """On a machine without the kernels: shapes, types and every temporary."""
    sequences, heads, size = 7, 12, 80
    pages = -(-tokens // PAGE_SIZE)

    def step(mark):
        mark("decode")
        arena = torch.empty(LAYERS, 2, PAGES, PAGE_SIZE, 4, size, dtype=torch.bfloat16)
        query = torch.empty(heads, sequences, size, dtype=torch.bfloat16).transpose(0, 1)
        key = torch.empty(sequences, 4, size, dtype=torch.bfloat16)
        table, lengths = torch.zeros(sequences, pages, dtype=torch.int32), torch.ones(sequences, dtype=torch.long)
        fused_store_kv(arena, 1, key, key, lengths)
        if grouped:
            out = grouped_paged_attention(query, arena, 1, table, lengths, lengths, lengths[None], 0.3, 0)
        else:
            out = fused_paged_attention(query, arena, 1, table, lengths, 0.3, 0)
        assert (out.shape, out.dtype, out.is_contiguous()) == ((sequences, heads, size), torch.bfloat16, True)

    rows = sequences * heads
    assert allocated(step)[-3:] == [rows * segments * size * 4, 2 * rows * segments * 4, rows * size * 2]


@pytest.mark.parametrize(("tokens", "window"), [(LEAST_SEGMENT, 0), (99 * LEAST_SEGMENT, LEAST_SEGMENT)])
def test_one_segment_leaves_nothing_to_merge(tokens, window):
    def step(mark):
        mark("decode")
        arena = torch.empty(LAYERS, 2, PAGES, PAGE_SIZE, 4, 80, dtype=torch.bfloat16)
        table = torch.zeros(7, tokens // PAGE_SIZE, dtype=torch.int32)
        lengths = torch.ones(7, dtype=torch.int32)
        query = torch.empty(12, 7, 80, dtype=torch.bfloat16).transpose(0, 1)
        assert fused_paged_attention(query, arena, 1, table, lengths, 0.3, window).is_contiguous()

    query = 7 * 12 * 80 * 2
    assert allocated(step)[-2:] == [query, query]


def allocated(step):
    return [event.size for event in record(step).events if getattr(event, "key", -1) >= 0 and hasattr(event, "size")]
