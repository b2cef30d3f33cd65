"""The engine's kernels on a CUDA device against their plain twins. Run: make gpu."""

import pytest
import torch

from ullage.model.kernels import fused, newest, paged, parts, sample
from ullage.model.kernels.truncate import least_kept
from ullage.rollout.embedded.bookkeeping import feed_fused, feed_plain, note_fused, note_plain
from ullage.rollout.embedded.sampler import kept
from ullage.rollout.embedded.state import Row, SlotState
from ullage.rollout.sampling import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE = 16
ROWS = (1, 7, 30, 256)
VOCABULARY = 151_936


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def close(got, want, steps=2):
    """Within so many roundings of bfloat16 of the largest number."""
    assert (got.float() - want.float()).abs().max() <= steps * 2**-8 * want.float().abs().max()


class Cache:
    """Sequences of any length in shuffled pages, NaN where nothing was written."""

    def __init__(self, count, kv_heads, size, longest=700):
        chance = torch.Generator().manual_seed(count)
        self.lengths = torch.randint(0, longest, (count,), generator=chance)
        width = -(-longest // PAGE)
        used = [-(-length // PAGE) for length in self.lengths.tolist()]
        order = torch.randperm(sum(used) + 1, generator=chance).tolist()
        self.table = torch.full((count, width), 2**30, dtype=torch.int32)
        self.arena = torch.full((2, 2, len(order), PAGE, kv_heads, size), float("nan"), dtype=torch.bfloat16)
        self.arena = self.arena.cuda()
        for row, (length, number) in enumerate(zip(self.lengths.tolist(), used, strict=True)):
            mine, order = order[:number], order[number:]
            self.table[row, :number] = torch.tensor(mine, dtype=torch.int32)
            flat = self.arena[1, :, mine].flatten(1, 2)
            flat[:, :length] = random(2, length, kv_heads, size, seed=row)
            self.arena[1, :, mine] = flat.unflatten(1, (number, PAGE))

    def want(self, query, window):
        table = self.table.where(self.table < 2**30, 0).long().cuda()
        wide = paged.paged_attention(
            query.double(), self.arena.double(), 1, table, self.lengths.cuda(), 0.1, window, True
        )
        return wide.masked_fill((self.lengths == 0).cuda()[:, None, None], 0)


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(14, 2, 64), (28, 4, 128), (32, 8, 128), (8, 8, 32), (4, 1, 256)]
)
@pytest.mark.parametrize("window", [0, 100])
def test_paged_attention(count, heads, kv_heads, size, window):
    cache = Cache(count, kv_heads, size)
    query = random(count, heads, size, seed=99)
    args = (cache.arena, 1, cache.table.cuda(), cache.lengths.int().cuda(), 0.1, window, 0.0, None)
    got = paged.fused_paged_attention(query, *args)
    there = (cache.lengths > 0).cuda()
    close(got[there], cache.want(query, window)[there])


@pytest.mark.parametrize("window", [0, 100])
def test_the_width_of_a_table_changes_no_bit(window):
    """Of segments that are written at once, merged of two and merged of sixteen."""
    cache = Cache(64, 2, 64, longest=256)
    query, lengths = random(64, 14, 64, seed=99), cache.lengths.int().cuda()
    results = []
    for width in (16, 32, 400):
        table = torch.zeros(64, width, dtype=torch.int32)
        table[:, :16] = cache.table
        results.append(
            paged.fused_paged_attention(query, cache.arena, 1, table.cuda(), lengths, 0.1, window, 0.0, None)
        )
    there = (cache.lengths > 0).cuda()
    close(results[0][there], cache.want(query, window)[there])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_attention_over_an_arena_of_more_numbers_than_31_bits_count():
    arena = torch.empty(3, 2, 30_000, PAGE, 8, 128, dtype=torch.bfloat16, device="cuda")
    assert arena.numel() > 2**31
    table = torch.tensor([[29_998, 29_999]], dtype=torch.int32, device="cuda")
    places = (table[0].long()[:, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()
    key, value = random(32, 8, 128), random(32, 8, 128, seed=1)
    paged.fused_store_kv(arena, 2, key, value, places)
    query, lengths = random(1, 32, 128, seed=2), torch.tensor([32], device="cuda", dtype=torch.int32)
    got = paged.fused_paged_attention(query, arena, 2, table, lengths, 0.1, 0, 0.0, None)
    small = torch.stack([key, value]).unflatten(1, (2, PAGE))[None]
    want = paged.paged_attention(
        query.double(), small.double(), 0, torch.tensor([[0, 1]], device="cuda"), lengths.long(), 0.1, 0, True
    )
    close(got, want)


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("normed", [False, True])
def test_rotating_and_storing(count, size, normed):
    heads, kv_heads = 6, 2
    widths = [n * size for n in (heads, kv_heads, kv_heads)]
    parts = random(count, sum(widths)).split(widths, dim=1)  # columns of one product
    cos, sin = random(count, size, seed=3), random(count, size, seed=4)
    weights = (random(size, seed=5), random(size, seed=6)) if normed else (None, None)
    places = torch.randperm(2 * count + 40, device="cuda")[:count]
    places[::5] = -1
    canary = random(3, 2, (2 * count + 40) // PAGE + 1, PAGE, kv_heads, size, seed=7)
    results = []
    for device in ("cuda", "cpu"):
        arena = canary.to(device)
        arguments = [x.to(device) for x in (*parts, cos, sin)]
        norms = [None if x is None else x.to(device) for x in weights]
        out, keys = fused.rotate_and_store(*arguments, *norms, 1e-6, arena, 1, places.to(device), normed)
        results.append((out.cuda(), keys.cuda(), arena.cuda()))
    (got, got_keys, got_arena), (want, want_keys, want_arena) = results
    close(got, want)
    assert got_keys.shape == want_keys.shape == (count if normed else 0, kv_heads, size)
    if normed:
        close(got_keys, want_keys)
    close(got_arena, want_arena)
    unchanged = (want_arena == canary).flatten(3).all(-1)
    assert torch.equal(got_arena[unchanged], canary[unchanged])


@pytest.mark.parametrize(("longest", "window"), [(400, 0), (400, 100), (1500, 0), (1500, 700)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (12, 2, 128), (16, 8, 128), (6, 2, 80)])
@pytest.mark.parametrize("normed", [False, True])
def test_the_newest_token_is_three_steps_in_one(heads, kv_heads, size, normed, window, longest):
    count = 90
    cache = Cache(count, kv_heads, size, longest)
    widths = [n * size for n in (heads, kv_heads, kv_heads)]
    parts = random(count, sum(widths)).split(widths, dim=1)
    weights = (random(size, seed=5) + 2, random(size, seed=6) + 2) if normed else (None, None)
    angles = random(count, size // 2, dtype=torch.float32, seed=3).repeat(1, 2)
    turn = fused.Turn(angles.cos().bfloat16(), angles.sin().bfloat16(), *weights, 1e-6)
    table, lengths = cache.table.cuda(), cache.lengths.cuda()
    last = (lengths - 1).clamp(min=0)
    places = (table.gather(1, (last // PAGE)[:, None])[:, 0] * PAGE + last % PAGE).where(lengths > 0, -1).long()
    # Where the new token goes there is nothing yet.
    cache.arena[1].flatten(1, 2)[:, places[places >= 0]] = float("nan")
    other = cache.arena.clone()
    rows, _ = fused.rotate_and_store(*parts, *turn, other, 1, places, False)
    got = newest.attend_newest(*parts, turn, cache.arena, 1, places, table, lengths, 0.03, window)
    # The norm's sum has another order, which now and then moves a rounding, and with it the next ones.
    close(cache.arena.nan_to_num(), other.nan_to_num(), steps=4)
    assert torch.equal(cache.arena.isnan(), other.isnan())
    assert torch.equal(cache.arena[:, 1].nan_to_num(), other[:, 1].nan_to_num())
    if not normed:
        assert torch.equal(cache.arena.nan_to_num(), other.nan_to_num())
    known = table.where(table < 2**30, 0).long()
    want = paged.paged_attention(rows.double(), other.double(), 1, known, lengths, 0.03, window, True)
    close(got, want.masked_fill((lengths == 0)[:, None, None], 0))


def test_operators_are_called_without_torch(monkeypatch):
    monkeypatch.setattr(fused.gate, "registered", None)
    x = random(3, 64)
    close(fused.gate(x, x), torch.nn.functional.silu(x) * x)


@pytest.mark.parametrize("half", [32, 64, 40])
def test_rotations_of_far_positions(half):
    positions = torch.arange(0, 131_072, 13, device="cuda")
    frequencies = (1e6 ** -(torch.arange(half, device="cuda") / half)).float()
    angles = (positions[:, None].float() * frequencies).repeat(1, 2)
    cos, sin = fused.rotations(positions, frequencies, 1.25, torch.bfloat16)
    assert torch.equal(cos, (angles.cos() * 1.25).bfloat16())
    assert torch.equal(sin, (angles.sin() * 1.25).bfloat16())


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("hidden", [64, 896, 3584, 5120])
def test_sums_norms_and_gates(count, hidden):
    x, residual, weight = random(count, hidden), random(count, hidden, seed=1), random(hidden, seed=2)
    for got, want in zip(
        fused.add_norm(x, residual, weight, 1e-6),
        fused.add_norm(x.cpu(), residual.cpu(), weight.cpu(), 1e-6),
        strict=True,
    ):
        close(got, want.cuda())
    close(fused.gate(x, residual), fused.gate(x.cpu(), residual.cpu()).cuda())
    gated, up = x.chunk(2, dim=1)  # columns of one product
    close(fused.gate(gated, up), fused.gate(gated.cpu(), up.cpu()).cuda())


@pytest.mark.parametrize("count", [1, 64, 256])
@pytest.mark.parametrize(("inner", "outer"), [(4864, 896), (8960, 1536), (18944, 3584)])
def test_products_in_parts(count, inner, outer):
    x, weight = random(count, inner), random(outer, inner, seed=1)
    residual, scale = random(count, outer, seed=2), random(outer, seed=3)
    found = parts.product_in_parts(x, weight, 4)
    exact = x.double() @ weight.double().T
    # Tensor cores cut their sums off instead of rounding them.
    assert (found.double().sum(0) - exact).abs().max() < 2**-22 * inner
    total, normed = fused.add_norm(found, residual, scale, 1e-6)
    want = fused.add_norm(found.sum(0).bfloat16(), residual, scale, 1e-6)
    close(total, want[0])
    close(normed, want[1])


@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("vocabulary", [700, 50_257, VOCABULARY])  # less than a block, rows that begin anywhere
def test_samples_and_their_log_probs(count, vocabulary):
    logits = 3 * random(count, vocabulary, dtype=torch.float32)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3], device="cuda").repeat(count)[:count]
    seeds = torch.arange(count, device="cuda") * 2**40 + 17
    positions = torch.arange(count, device="cuda")
    tokens, logprobs = sample.sample_fused(logits, temperature, seeds, positions)
    want_tokens, want = sample.sample_plain(logits, temperature, seeds, positions)
    assert (tokens != want_tokens).sum() <= count // 100  # two almost equal candidates
    same = tokens == want_tokens
    assert (logprobs - want)[same].abs().max() < 2e-5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_numbers_name_an_id_and_say_so(temperature):
    logits = 3 * random(5, 5000, dtype=torch.float32)
    logits[0] = float("nan")
    logits[1] = -float("inf")
    logits[2, [0, 1030, 4999]] = float("nan")
    logits[3, :4999] = -float("inf")
    each = torch.arange(5, device="cuda")
    given = (logits, torch.full((5,), temperature, device="cuda"), each, each)
    tokens, logprobs = sample.sample_fused(*given)
    want, _ = sample.sample_plain(*given)
    assert torch.equal(tokens, want)
    assert tokens[[0, 1, 3]].tolist() == [0, 0, 4999]
    assert logprobs.isnan().tolist() == [True, True, True, False, False]


def test_truncation_keeps_what_a_sort_keeps():
    logits = 3 * random(64, VOCABULARY, dtype=torch.float32)
    top_k = torch.tensor([1, 20, 1000, 2**62] * 16, device="cuda")
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.999] * 4, device="cuda").repeat_interleave(4)
    got = logits >= least_kept(logits, top_k, top_p)[:, None]
    want = kept(logits.double(), top_p[:, None].double(), top_k[:, None])
    differing = logits.double().softmax(-1).masked_fill(got == want, 0).sum(-1)
    assert (differing < 1e-6).all()  # the last of a sum that is rounded


def test_rows_find_their_places_and_note_what_was_drawn():
    samples = [
        Row(range(8 * n, 8 * n + 8), 3 * n + 1, 5, n % 9, 6, n, Sampling(max_tokens=6, ignore_eos=n % 3 == 0))
        for n in range(30)
    ]
    tokens = torch.arange(-1, 29) % 12
    results = []
    for device, note in (("cpu", note_plain), ("cuda", note_fused)):
        state = SlotState(30, pages=8, window=4, stop_ids=[2, 9], dtype=torch.float32, device=torch.device(device))
        state.place(0, samples)
        rows = state.rows(0, 30)
        rows.running[::4] = 0
        note(rows, tokens.to(device), torch.arange(30.0, device=device), torch.tensor([3], device=device), 10)
        feed = feed_plain(rows, 10**6) if device == "cpu" else feed_fused(rows)
        results.append([x.cpu() for x in (rows.tokens, rows.last, rows.drawn, rows.running, *feed)])
    (*noted, places, lengths, _), (*noted_there, places_there, lengths_there, _) = results
    for got, want in zip(noted_there, noted, strict=True):
        assert torch.equal(got, want)
    goes_on = noted[-1] == 1
    assert 0 < goes_on.sum() < 30
    assert torch.equal(places_there, places.where(goes_on, -1))
    assert torch.equal(lengths_there, lengths.where(goes_on, 0))
