"""The Triton kernels between a decoder's products against plain torch, under Triton's interpreter (`make triton`).

In float16: the interpreter cuts bfloat16 off instead of rounding it.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from ullage.model.kernels import fused

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [pytest.mark.triton, pytest.mark.skipif(not INTERPRETED, reason="`make triton` runs it, where Triton is")]

CANARY = 77.0


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


@pytest.mark.parametrize(("rows", "width"), [(3, 96), (5, 128), (1, 1000)])
def test_sums_and_their_norms(rows, width):
    from ullage.model.kernels.fused_triton import add_norm_into

    x, residual, weight = random(rows, width), random(rows, width) * 2, random(width)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    add_norm_into(total, normed, x, residual, weight, 1e-6)
    want_total, want_normed = fused.add_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, want_total)
    torch.testing.assert_close(normed, want_normed, rtol=1e-3, atol=1e-3)


def test_parts_are_added_up_on_the_way():
    from ullage.model.kernels.fused_triton import add_norm_into

    parts, residual, weight = random(4, 3, 96).float(), random(3, 96) * 2, random(96)
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    add_norm_into(total, normed, parts, residual, weight, 1e-6)
    summed = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert torch.equal(total, summed.half() + residual)
    torch.testing.assert_close(normed, fused.norm(total, weight, 1e-6), rtol=1e-3, atol=1e-3)


def test_norms_alone():
    from ullage.model.kernels.fused_triton import add_norm_into

    x, weight = random(5, 200) * 3, random(200)
    normed = torch.empty_like(x)
    add_norm_into(None, normed, x, None, weight, 1e-6)
    torch.testing.assert_close(normed, fused.norm(x, weight, 1e-6), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("half", [8, 40])
def test_rotations(half):
    from ullage.model.kernels.fused_triton import rotations_into

    positions = torch.tensor([0, 1, 2, 77, 4095])
    frequencies = 1e4 ** -(torch.arange(half) / half)
    cos, sin = torch.full((2, 7, 2 * half), CANARY, dtype=torch.half)
    rotations_into(cos[1:-1], sin[1:-1], positions, frequencies, 1.5)
    for got, want in zip((cos, sin), fused.rotations(positions, frequencies, 1.5, torch.half), strict=True):
        torch.testing.assert_close(got[1:-1], want, rtol=0, atol=1.5 * 2**-11)
        assert bool((got[[0, -1]] == CANARY).all())


def test_the_gate():
    from ullage.model.kernels.fused_triton import gate_into

    gated, up = random(7, 301), random(7, 301) * 3
    out = torch.empty_like(up)
    gate_into(out, gated, up)
    torch.testing.assert_close(out, fused.gate(gated, up), rtol=1e-3, atol=1e-3)


def test_the_gate_of_columns_of_one_product(monkeypatch):
    """Rows of several programs, that lie apart."""
    monkeypatch.setattr("ullage.model.kernels.fused_triton.GATE_BLOCK", 128)
    from ullage.model.kernels.fused_triton import gate_into

    gated, up = random(7, 2 * 301).split(301, dim=1)
    memory = torch.full((9, 301), CANARY, dtype=torch.half)
    gate_into(memory[1:-1], gated, up)
    torch.testing.assert_close(memory[1:-1], fused.gate(gated, up), rtol=1e-3, atol=1e-3)
    assert bool((memory[[0, -1]] == CANARY).all())


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "norms"), [(4, 2, 32, False), (6, 2, 64, True), (3, 3, 80, True), (7, 1, 16, False)]
)
def test_keys_and_values_go_to_their_places_and_nobodys_go_nowhere(heads, kv_heads, size, norms, joint):
    from ullage.model.kernels.fused_triton import rotate_and_store_into

    tokens, layers, pages, page = 6, 3, 4, 16
    widths = [count * size for count in (heads, kv_heads, kv_heads)]
    query, key, value = random(tokens, sum(widths)).split(widths, dim=1)  # columns of one product
    if not joint:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    cos, sin = random(tokens, size), random(tokens, size) + 1
    places = torch.tensor([3, -1, 17, 40, -1, 63], dtype=torch.int32)
    query_norm, key_norm = (random(size), random(size) + 2) if norms else (None, None)
    # Memory of others lies before and behind the arena.
    numel = layers * 2 * pages * page * kv_heads * size
    memory = torch.full((numel + 2000,), CANARY, dtype=torch.half)
    arena = memory[1000:-1000].view(layers, 2, pages, page, kv_heads, size)
    other = arena.clone()
    for layer in range(layers):
        out, keys = query.new_empty(tokens, heads, size), key.new_empty(tokens if joint else 0, kv_heads, size)
        rest = (query_norm, key_norm, 1e-6)
        rotate_and_store_into(out, keys, query, key, value, cos, sin, *rest, arena, layer, places)
        want, want_keys = fused.rotate_and_store(query, key, value, cos, sin, *rest, other, layer, places.long(), joint)
        torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(keys, want_keys, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(arena, other, rtol=2e-3, atol=2e-3)
    assert bool((memory[:1000] == CANARY).all() & (memory[-1000:] == CANARY).all())
    flat = arena.flatten(2, 3)
    untouched = [place for place in range(pages * page) if place not in places.tolist()]
    assert bool((flat[:, :, untouched] == CANARY).all())
