"""Packed attention against attention written out: masks, windows, soft caps, sinks, shared prompts."""

import pytest
import torch

from experience_samples import CPU
from ullage.base.errors import ModelError
from ullage.model.attention import Extras, PackedLayout, Sequences, Span, attention

HEADS, KV_HEADS, SIZE = 4, 2, 8
SPANS = (Span(0, 5, (3, 0, 6)), Span(14, 4, ()), Span(18, 1, (2,)), Span(21, 1, (0, 0)))
TOKENS = 22


def who_sees_whom():
    """[T, T] by the definition: same block, not a sibling's, not later; and the distance between positions."""
    block, owner, position = [], [], []
    for number, span in enumerate(SPANS):
        block += [number] * span.total
        owner += [-1] * span.prompt + [i for i, length in enumerate(span.responses) for _ in range(length)]
        position += list(range(span.prompt)) + [span.prompt + t for length in span.responses for t in range(length)]
    visible = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    distance = torch.zeros(TOKENS, TOKENS)
    for i in range(TOKENS):
        for j in range(TOKENS):
            related = block[i] == block[j] and owner[j] in (-1, owner[i])
            visible[i, j] = related and position[j] <= position[i]
            distance[i, j] = position[i] - position[j]
    return visible, distance


def written_out(query, key, value, extras):
    visible, distance = who_sees_whom()
    if extras.window:
        visible &= distance < extras.window
    out = torch.empty(TOKENS, HEADS, SIZE, dtype=query.dtype)
    for head in range(HEADS):
        scores = query[head] @ key[head // 2].t() * extras.scaling
        if extras.softcap is not None:
            scores = extras.softcap * torch.tanh(scores / extras.softcap)
        weights = scores.masked_fill(~visible, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if extras.sinks is not None:
            total = total + extras.sinks[head].exp()
        out[:, head] = weights / total @ value[head // 2]
    return out


@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, (0.5, -1.0, 2.0, 0.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_packed_attention_and_its_gradient(window, softcap, sinks, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, TOKENS, SIZE), (KV_HEADS, TOKENS, SIZE), (KV_HEADS, TOKENS, SIZE), (TOKENS, HEADS, SIZE))
    *inputs, upstream = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    extras = Extras(0.3, window, softcap, None if sinks is None else torch.tensor(sinks, dtype=dtype))
    got = PackedLayout(SPANS, CPU, dtype).attend(0, *inputs, extras)
    want = written_out(*inputs, extras)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    gradients = [torch.autograd.grad(out, inputs, upstream) for out in (got, want)]
    torch.testing.assert_close(*gradients, rtol=0, atol=10 * tolerance)


class _Attention(torch.nn.Module):
    layer_idx = 3


class _Layout:
    def attend(self, layer, query, key, value, extras):
        self.seen = (layer, extras)
        return query.transpose(0, 1)


def test_the_registered_function_hands_over_what_architectures_pass():
    layout, query = _Layout(), torch.randn(1, HEADS, 2, 16)
    out, weights = attention(
        _Attention(),
        query,
        query,
        query,
        None,
        layout=layout,
        sliding_window=9,
        softcap=5.0,
        dropout=0.5,
        position_ids=1,
    )
    assert layout.seen == (3, Extras(0.25, 9, 5.0, None))
    assert torch.equal(out, query.transpose(1, 2))
    assert weights is None
    attention(_Attention(), query, query, query, None, layout=layout, scaling=0.7)
    assert layout.seen == (3, Extras(0.7, 0, None, None))


def test_an_architecture_that_drops_the_layout_or_brings_a_mask_is_refused():
    query = torch.randn(1, HEADS, 2, 16)
    with pytest.raises(ModelError, match="_Attention does not pass keyword arguments on"):
        attention(_Attention(), query, query, query, None)
    with pytest.raises(ModelError, match="_Attention makes an attention mask of its own"):
        attention(_Attention(), query, query, query, torch.zeros(2, 2), layout=_Layout())


@pytest.mark.filterwarnings("error:.*lru_cache")
def test_compiled_attention_asks_no_cached_function():
    """The compiler warns every user of a run about one."""
    layout = Sequences.of([Span(0, 4, (3, 3))], torch.device("meta"))
    query, key = (torch.empty(heads, 10, 16, dtype=torch.bfloat16, device="meta") for heads in (2, 1))
    attend = torch.compile(layout.attend, backend="eager", dynamic=True)
    assert attend(query, key, key, Extras(0.25, 0, None, None)).shape == (10, 2, 16)
