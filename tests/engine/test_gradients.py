"""Gradients in a buffer of another dtype or on the host: exact sums, failures that surface, nothing left behind."""

import gc
import math
import threading
import time

import pytest
import torch

from ullage.engine import gradients
from ullage.engine.gradients import Gradients, HostGradients, global_norm


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((40, 30), (7,), (513,))]


def backward(parameters, seed):
    """One micro-batch; its gradients are the weights of a sum."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]
    sum((p * part).sum() for p, part in zip(parameters, parts, strict=True)).backward()
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [64, 1 << 22])
def test_on_the_host_they_are_summed_as_on_the_device(dtype, piece):
    sums = []
    for kind, more in ((Gradients, {}), (HostGradients, {"piece": piece})):
        parameters = make_parameters(dtype)
        collected = kind(parameters, dtype, **more)
        for seed in range(4):
            backward(parameters, seed)
        collected.settle()
        sums.append(collected.flat.clone())
        if kind is HostGradients:
            assert all(p.grad is None for p in parameters)
        collected.zero()
        assert not collected.flat.any()
    assert sums[0].abs().sum() > 0
    assert torch.equal(*sums)


@pytest.mark.parametrize("kind", [Gradients, HostGradients])
def test_float32_sums_of_bfloat16_gradients(kind):
    # 256 + 1 is 256 in bfloat16.
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    wide = kind([parameter], torch.float32)
    for _ in range(300):
        parameter.sum().backward()
    wide.settle()
    assert wide.flat.tolist() == [300.0] * 3
    assert parameter.grad is None
    narrow = kind([parameter], torch.bfloat16)
    del wide
    for _ in range(300):
        parameter.sum().backward()
    narrow.settle()
    assert narrow.flat.tolist() == [256.0] * 3


def test_bytes_on_the_host_count_what_is_on_the_way():
    collected = HostGradients(make_parameters(torch.bfloat16), torch.float32, piece=256)
    assert collected.host_nbytes == (1200 + 7 + 513) * 4 + 4 * 256 * 2
    assert Gradients(make_parameters(), torch.float32).host_nbytes == 0


def test_a_failure_on_the_way_surfaces_once_and_blocks_nothing(monkeypatch):
    parameters = make_parameters()
    collected = HostGradients(parameters, torch.float32, piece=64)

    class Broken:
        def wait(self):
            raise RuntimeError("the copy failed")

    with monkeypatch.context() as patch:
        patch.setattr(collected._courier._stream, "mark", Broken)
        backward(parameters, 0)  # many more pieces than stages
        with pytest.raises(RuntimeError, match="the copy failed"):
            collected.settle()
        collected.settle()
        backward(parameters, 0)
        collected.zero()  # a new sum has nothing to do with it
        collected.settle()
    want = backward(parameters, 1)
    collected.settle()
    assert torch.equal(collected.flat, want)


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("half-way")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Gradients, HostGradients])
def test_a_pass_that_fails_half_way_can_be_repeated(kind, dtype):
    parameters = make_parameters(dtype)
    collected = kind(parameters, torch.float32)
    first, *rest = parameters
    with pytest.raises(MemoryError):
        (sum(p.sum() for p in rest) + FailsBackward.apply(first).sum()).backward()
    collected.zero()
    want = backward(parameters, 5)
    collected.settle()
    assert torch.equal(collected.flat, want.float())


def test_zero_waits_for_what_is_on_its_way(monkeypatch):
    parameters = make_parameters()
    collected = HostGradients(parameters, torch.float32)

    class Slow:
        def wait(self):
            time.sleep(0.05)

    monkeypatch.setattr(collected._courier._stream, "mark", Slow)
    backward(parameters, 0)
    collected.zero()
    assert collected._courier._arriving.unfinished_tasks == 0
    assert not collected.flat.any()


def test_hooks_and_the_thread_go_with_their_owner():
    parameters = make_parameters()
    collected = HostGradients(parameters, torch.float32)
    backward(parameters, 0)
    collected.settle()
    (thread,) = [thread for thread in threading.enumerate() if thread is collected._courier._thread]
    del collected
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
    want = backward(parameters, 1)
    assert torch.equal(torch.cat([p.grad.flatten() for p in parameters]), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norm_over_many_chunks(dtype, monkeypatch):
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = global_norm(flat)
    monkeypatch.setattr(gradients, "CHUNK", 1024)
    monkeypatch.setattr(gradients, "ROW", 64)
    want = math.sqrt(sum(x * x for x in flat.double().tolist()))
    assert whole == pytest.approx(want, rel=1e-6)
    assert global_norm(flat) == pytest.approx(want, rel=1e-14 if dtype == torch.float64 else 1e-7)
    flat[4999] = math.inf
    assert global_norm(flat) == math.inf
    flat[7] = math.nan
    assert math.isnan(global_norm(flat))
