"""Gradient checkpointing: which layers run twice under gradients, what they keep, and that nothing changes."""

import pytest
import torch

from counted_operators import CountedOperators
from ullage.engine.offload import SynchronizedGroupOffloadHandler, offload_activations
from ullage.engine.recompute import recompute_layers


class _Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)
        self.calls = 0

    def forward(self, inputs, *, factor=1.0):
        self.calls += 1
        return torch.tanh(self.linear(inputs)) * factor


def make_layers(count):
    torch.manual_seed(0)
    return [_Layer() for _ in range(count)]


def make_inputs():
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)


def gradients(layers):
    """And how often each layer ran."""
    inputs = make_inputs()
    hidden = inputs
    for layer in layers:
        layer.calls = 0
        hidden = layer(hidden)
    found = torch.autograd.grad(hidden.sum(), [inputs, *torch.nn.ModuleList(layers).parameters()])
    return found, [layer.calls for layer in layers]


def assert_equal(got, want):
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_layers_run_again_in_backward_and_agree():
    torch.manual_seed(0)
    layer, inputs = _Layer(), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    plain = layer(inputs, factor=2.0)
    want = torch.autograd.grad(plain.sum(), [inputs, *layer.parameters()])
    recompute_layers([layer])
    layer.calls = 0
    out = layer(inputs, factor=2.0)
    assert layer.calls == 1
    got = torch.autograd.grad(out.sum(), [inputs, *layer.parameters()])
    assert layer.calls == 2
    assert torch.equal(out, plain)
    assert_equal(got, want)


def test_without_gradients_nothing_is_kept_or_repeated():
    layer = _Layer()
    recompute_layers([layer])
    with torch.no_grad():
        out = layer(torch.ones(1, 3, dtype=torch.float64), factor=1.0)
    assert layer.calls == 1
    assert not out.requires_grad


def test_activations_inside_a_layer_are_not_saved():
    layer = _Layer()
    inputs = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda x: x):
        layer(inputs, factor=2.0)
        without = len(saved)
        saved.clear()
        recompute_layers([layer])
        layer(inputs, factor=2.0)
    assert without > 0
    assert len(saved) < without


@pytest.mark.parametrize(
    ("share", "count", "calls"),
    [
        (0.0, 6, [1, 1, 1, 1, 1, 1]),
        (1 / 6, 6, [1, 1, 1, 1, 1, 2]),
        (0.5, 6, [1, 2, 1, 2, 1, 2]),
        (2 / 3, 6, [1, 2, 2, 1, 2, 2]),
        (1.0, 6, [2, 2, 2, 2, 2, 2]),
        (0.4, 5, [1, 1, 2, 1, 2]),
        (0.05, 6, [1, 1, 1, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("keep", ["nothing", "matmuls"])
def test_a_share_of_the_layers_evenly_spread(share, count, calls, keep):
    layers = make_layers(count)
    want, _ = gradients(layers)
    recompute_layers(layers, share=share, keep=keep)
    got, ran = gradients(layers)
    assert_equal(got, want)
    assert ran == calls


def test_the_last_call_counts():
    layers = make_layers(4)
    want, once = gradients(layers)
    for share, keep in ((1.0, "nothing"), (1.0, "matmuls"), (0.5, "nothing"), (1.0, "nothing")):
        recompute_layers(layers, share=share, keep=keep)
    got, ran = gradients(layers)
    assert ran == [2, 2, 2, 2]
    assert_equal(got, want)
    recompute_layers(layers, share=0.0)
    got, ran = gradients(layers)
    assert ran == once == [1, 1, 1, 1]
    assert_equal(got, want)


class _Attention(torch.nn.Module):
    """A product, attention and another product, with cheap things between."""

    def __init__(self):
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, inputs):
        mixed = torch.tanh(self.linears[0](inputs)).view(1, 5, 2, 4).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(mixed, mixed, mixed, is_causal=True)
        return inputs + torch.tanh(self.linears[1](torch.tanh(attended.transpose(1, 2).reshape(1, 5, 8))))


@pytest.mark.parametrize(
    ("keep", "products", "attentions", "tanhs"), [("nothing", 2, 1, 3), ("matmuls", 0, 0, 3), (None, 0, 0, 0)]
)
def test_kept_operators_do_not_run_again(keep, products, attentions, tanhs):
    torch.manual_seed(0)
    layer, inputs = _Attention(), torch.randn(1, 5, 8, requires_grad=True)
    wanted = [inputs, *layer.parameters()]
    want = torch.autograd.grad(layer(inputs).sum(), wanted)
    with CountedOperators() as plain:
        torch.autograd.grad(layer(inputs).sum(), wanted)
    if keep is not None:
        recompute_layers([layer], keep=keep)
    with CountedOperators() as counted:
        got = torch.autograd.grad(layer(inputs).sum(), wanted)
    assert_equal(got, want)

    def extra(name):
        return counted.names.count(name) - plain.names.count(name)

    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert plain.names.count(attention) == 1
    assert (extra("aten::mm"), extra(attention), extra("aten::tanh")) == (products, attentions, tanhs)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_offload_stays_outside_and_takes_what_a_layer_keeps(share):
    layers = make_layers(4)
    want, _ = gradients(layers)
    handler = SynchronizedGroupOffloadHandler(4, device="cpu", min_bytes=1)
    offload_activations(layers, handler)
    recompute_layers(layers, share=share)
    got, ran = gradients(layers)
    assert_equal(got, want)
    assert ran == ([1, 2, 1, 2] if share == 0.5 else [2] * 4)
    # An input each; a layer that is not recomputed saves its tanh as well.
    assert handler.offloaded_bytes == 4 * 3 * 8 * (4 if share == 1.0 else 6)
    recompute_layers(layers, share=0.0)
    assert_equal(gradients(layers)[0], want)
    assert handler.offloaded_bytes == 4 * 3 * 8 * 8
