"""The chunked head: gradients by finite differences, chunk invariance, and no tensor of [positions, vocabulary]."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.model.head import Head

SHAPES = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0},
    "everything": {"bias": True, "scale": 1.5, "softcap": 3.0},
}


def make(positions=5, hidden=4, vocabulary=7, dtype=torch.float64, bias=False, **options):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, vocabulary, (positions,), generator=generator)
    weight, offsets = random(vocabulary, hidden), random(vocabulary) if bias else None
    return random(positions, hidden), targets, Head(weight=weight, bias=offsets, **options)


def plain(hidden, targets, head, temperature):
    """The same by the book, with all logits at once."""
    logits = hidden @ head.weight.t()
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_gradients_are_those_of_finite_differences(shape, temperature, chunk):
    hidden, targets, head = make(**SHAPES[shape])
    inputs = [hidden, head.weight] + ([head.bias] if head.bias is not None else [])

    def run(hidden, weight, bias=None):
        again = Head(weight=weight, bias=bias, scale=head.scale, softcap=head.softcap)
        return again.logprobs(hidden, targets, temperature=temperature, entropy=True, chunk=chunk)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 17, None])
def test_values_and_gradients_equal_the_plain_head(shape, chunk):
    hidden, targets, head = make(16, 8, 33, **SHAPES[shape])
    inputs = [hidden, head.weight] + ([head.bias] if head.bias is not None else [])
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(16, generator=generator, dtype=torch.float64) for _ in range(2)]
    got = head.logprobs(hidden, targets, temperature=0.8, entropy=True, chunk=chunk)
    want = plain(hidden, targets, head, 0.8)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream), rtol=0, atol=1e-11
    )


def test_without_entropy_nothing_is_returned_for_it():
    hidden, targets, head = make()
    logprobs, entropies = head.logprobs(hidden, targets, temperature=1.0, entropy=False)
    assert entropies is None
    torch.testing.assert_close(logprobs, plain(hidden, targets, head, 1.0)[0], rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(logprobs.sum(), [hidden])
    (want,) = torch.autograd.grad(plain(hidden, targets, head, 1.0)[0].sum(), [hidden])
    torch.testing.assert_close(gradient, want, rtol=0, atol=1e-12)


def test_entropy_by_hand():
    # Logits log 1, log 1, log 2: probabilities 1/4, 1/4, 1/2, entropy 1.5 log 2.
    head = Head(weight=torch.tensor([[0.0], [0.0], [2.0]], dtype=torch.float64).log1p())
    hidden = torch.tensor([[torch.log(torch.tensor(2.0, dtype=torch.float64)) / torch.tensor(3.0).double().log()]])
    logprobs, entropies = head.logprobs(hidden, torch.tensor([2]), temperature=1.0, entropy=True)
    assert logprobs.item() == pytest.approx(-0.6931471805599453, abs=1e-12)
    assert entropies.item() == pytest.approx(1.5 * 0.6931471805599453, abs=1e-12)


def test_bfloat16_gives_float32_logprobs():
    hidden, targets, head = make(6, 8, 11, dtype=torch.bfloat16)
    logprobs, entropies = head.logprobs(hidden, targets, temperature=1.0, entropy=True, chunk=4)
    wide = Head(weight=head.weight.float())
    want = plain(hidden.float(), targets, wide, 1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close((logprobs, entropies), want, rtol=0, atol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_never_holds_the_logits_of_all_positions():
    positions, vocabulary, chunk = 512, 300, 16
    hidden, targets, head = make(positions, 8, vocabulary)
    with _Largest() as largest:
        logprobs, entropies = head.logprobs(hidden, targets, temperature=1.0, entropy=True, chunk=chunk)
        (logprobs.sum() + entropies.sum()).backward()
    assert largest.elements == max(chunk * vocabulary, positions * 8)
    assert largest.elements < positions * vocabulary // 20


def test_default_chunk_follows_the_vocabulary(monkeypatch):
    monkeypatch.setattr("ullage.model.head.CHUNK_LOGITS", 2000)
    hidden, targets, head = make(64, 4, 100)
    with _Largest() as largest:
        head.logprobs(hidden, targets, temperature=1.0, entropy=False)
    assert largest.elements == 2000


SUPPORTS = [[0, 3, 6], [2], [1, 2, 3, 4, 5, 6], [5, 0], [4, 1]]


def with_supports(hidden, targets, head, temperature):
    """By the book: everything outside the support has probability 0."""
    logits = hidden @ head.weight.t() * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logprobs, entropies = [], []
    for row, target, ids in zip(logits / temperature, targets.tolist(), SUPPORTS, strict=True):
        inside = row[ids].log_softmax(-1)
        logprobs.append(inside[ids.index(target)])
        entropies.append(-(inside.exp() * inside).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_truncated_distribution_is_renormalised(chunk, softcap):
    hidden, _, head = make(scale=1.5, softcap=softcap)
    targets = torch.tensor([3, 2, 6, 0, 4])
    supports = tuple(torch.tensor(ids, dtype=torch.int32) for ids in SUPPORTS)
    upstream = [torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64), torch.ones(5, dtype=torch.float64)]
    got = head.logprobs(hidden, targets, temperature=0.7, entropy=True, supports=supports, chunk=chunk)
    want = with_supports(hidden, targets, head, 0.7)
    assert got[0][1].item() == 0.0, "one id was left: it was certain"
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    inputs = [hidden, head.weight]
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, upstream), torch.autograd.grad(want, inputs, upstream), rtol=0, atol=1e-11
    )
