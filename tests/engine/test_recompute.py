"""Gradient checkpointing: layers run twice under gradients, once without, with the same result."""

import torch

from ullage.engine.recompute import recompute_layers


class _Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)
        self.calls = 0

    def forward(self, inputs, *, factor):
        self.calls += 1
        return torch.tanh(self.linear(inputs)) * factor


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
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


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
