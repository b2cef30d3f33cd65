"""The kernel of the newest token against rotation, storing and attention one after another, under Triton's interpreter.

`make triton` runs it. In float16: the interpreter cuts bfloat16 off instead of rounding it.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from ullage.model.kernels import fused, newest, paged

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [pytest.mark.triton, pytest.mark.skipif(not INTERPRETED, reason="`make triton` runs it, where Triton is")]

PAGE = 16
LENGTHS = [1, 2, 16, 17, 33, 65, 97, 0]
"""The new token included: alone, at the begin and end of pages (16) and as the first of a segment (here 32 and 64)."""
LAYER = 1


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Many tiles and segments in a short context."""
    from ullage.model.kernels import newest_triton, paged_triton

    monkeypatch.setattr(paged_triton, "TILE_ELEMENTS", 1024)
    for module in (paged, paged_triton, newest_triton):
        monkeypatch.setattr(module, "LEAST_SEGMENT", 32)
    for module in (paged, paged_triton):
        monkeypatch.setattr(module, "SEGMENTS", 3)


def random(*shape, seed=0, dtype=torch.half):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def sequences(kv_heads, size, lengths=LENGTHS, dtype=torch.half):
    """An arena that is NaN wherever nothing was written before the new tokens, its tables and their places."""
    width = -(-max(lengths) // PAGE)
    order = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(3))
    table = order.view(len(lengths), width)
    arena = torch.full((2, 2, len(order), PAGE, kv_heads, size), float("nan"), dtype=dtype)
    places = []
    for row, length in enumerate(lengths):
        for t in range(length - 1):
            arena[LAYER, :, table[row, t // PAGE], t % PAGE] = random(2, kv_heads, size, seed=100 * row + t).to(dtype)
        last = length - 1
        places.append(int(table[row, last // PAGE]) * PAGE + last % PAGE if length else -1)
    return arena, table, torch.tensor(lengths), torch.tensor(places)


def projections(heads, kv_heads, size, rows, dtype=torch.half):
    """Columns of one product."""
    widths = [count * size for count in (heads, kv_heads, kv_heads)]
    return random(rows, sum(widths), dtype=dtype).split(widths, dim=1)


def turn_of(rows, size, *, normed, dtype=torch.half):
    angles = random(rows, size // 2, seed=7, dtype=torch.float32).repeat(1, 2)
    norms = (random(size, seed=8, dtype=dtype) + 1, random(size, seed=9, dtype=dtype) + 1) if normed else (None, None)
    return fused.Turn(angles.cos().to(dtype), angles.sin().to(dtype), *norms, 1e-6)


@pytest.mark.parametrize("window", [0, 20, 40, 70])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "normed"),
    [(14, 2, 64, False), (4, 2, 128, True), (3, 1, 80, True), (6, 6, 16, False), (17, 1, 32, False)],
)
def test_it_is_three_steps_in_one(heads, kv_heads, size, normed, window):
    arena, table, lengths, places = sequences(kv_heads, size)
    parts, turn = projections(heads, kv_heads, size, len(lengths)), turn_of(len(lengths), size, normed=normed)
    other = arena.clone()
    rows, _ = fused.rotate_and_store(*parts, *turn, other, LAYER, places, False)
    want = paged.paged_attention(rows.double(), other.double(), LAYER, table, lengths, 0.2, window, True)
    got = newest.attend_newest(*parts, turn, arena, LAYER, places, table, lengths, 0.2, window)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4e-3)
    assert torch.equal(got[-1], torch.zeros(heads, size, dtype=torch.half)), "nothing to attend to"
    # Values as they are, keys to a rounding: nothing else was written.
    assert torch.equal(arena[:, 1].nan_to_num(7), other[:, 1].nan_to_num(7))
    torch.testing.assert_close(arena, other, rtol=2e-3, atol=2e-3, equal_nan=True)


def test_keys_and_queries_are_rounded_as_apart():
    """Attention over the new token alone gives its value; a second one weighs both by the rotated numbers."""
    arena, table, lengths, places = sequences(2, 64, lengths=[1, 2, 2, 40])
    parts, turn = projections(4, 2, 64, 4), turn_of(4, 64, normed=False)
    other = arena.clone()
    from ullage.model.kernels.fused_triton import rotate_and_store_into

    rows = parts[0].new_empty(4, 4, 64)
    rotate_and_store_into(rows, rows[:0], *parts, *turn, other, LAYER, places)
    newest.attend_newest(*parts, turn, arena, LAYER, places, table, lengths, 0.2, 0)
    assert torch.equal(arena.nan_to_num(7), other.nan_to_num(7))


def test_a_sequence_gets_the_same_bits_in_any_company():
    arena, table, lengths, places = sequences(2, 64)
    parts, turn = projections(4, 2, 64, len(lengths)), turn_of(len(lengths), 64, normed=True)
    together = newest.attend_newest(*parts, turn, arena, LAYER, places, table, lengths, 0.2, 0)
    for row in (0, 3, 4, 6):
        one = slice(row, row + 1)
        narrow = table[one, : -(-LENGTHS[row] // PAGE)]
        alone = newest.attend_newest(
            *(part[one] for part in parts), turn._replace(cos=turn.cos[one], sin=turn.sin[one]), arena, LAYER,
            places[one], narrow, lengths[one], 0.2, 0,
        )  # fmt: skip
        assert torch.equal(alone, together[one])


@pytest.mark.parametrize("at_once", [True, False])
def test_the_operator_passes_torchs_own_checks(at_once):
    arena, table, lengths, places = sequences(1, 16, dtype=torch.float32)
    count = len(lengths)
    parts = projections(2, 1, 16, count, torch.float32)
    turn = turn_of(count, 16, normed=True, dtype=torch.float32)
    results = (torch.zeros(count, 2, 16), None, None)
    if not at_once:
        results = (None, torch.zeros(count, 2, 3, 16), torch.zeros(2, count, 2, 3))
    torch.library.opcheck(
        newest.attend_newest_.registered,
        (*parts, *turn, arena.nan_to_num(), LAYER, places, table, lengths, *results, 0.2, 0),
        test_utils=("test_schema", "test_faketensor"),
    )
