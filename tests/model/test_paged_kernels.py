"""The custom ops of the paged cache: torch's own checks, and values against plain attention."""

import pytest
import torch

from ullage.model.kernels.paged import paged_attention, store_kv

LAYERS, PAGES, PAGE_SIZE, KV_HEADS, HEADS, SIZE = 2, 6, 4, 2, 4, 8


def make_arena(dtype=torch.float32):
    shape = (LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, SIZE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_store_kv_passes_opcheck():
    key, value = random(3, KV_HEADS, SIZE), random(3, KV_HEADS, SIZE) + 1
    torch.library.opcheck(store_kv, (make_arena(), 1, key, value, torch.tensor([0, 7, 22])))


@pytest.mark.parametrize(("window", "wide"), [(0, False), (3, False), (0, True)])
def test_paged_attention_passes_opcheck(window, wide):
    table, lengths = torch.tensor([[3, 0], [5, 1], [2, 4]]), torch.tensor([5, 8, 1])
    arguments = (random(3, HEADS, SIZE), make_arena(), 1, table, lengths, 0.3, window, wide)
    torch.library.opcheck(paged_attention, arguments)


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
