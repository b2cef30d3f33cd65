"""Targets: which kernels and dtypes follow from which device."""

import pytest
import torch

from ullage.base.errors import ConfigError
from ullage.model.target import Target, find_target

HOPPER = Target("cuda", 1, (9, 0), 80 << 30)
TURING = Target("cuda", 0, (7, 5), 16 << 30)
PROCESSOR = Target("cpu", 0, (0, 0), 8 << 30)


def test_devices_and_default_dtypes():
    assert (HOPPER.device, HOPPER.default_dtype) == (torch.device("cuda", 1), torch.bfloat16)
    assert (PROCESSOR.device, PROCESSOR.default_dtype) == (torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("target", "dtype", "varlen"),
    [
        (HOPPER, torch.bfloat16, True),
        (HOPPER, torch.float16, True),
        (HOPPER, torch.float32, False),
        (TURING, torch.float16, False),
        (PROCESSOR, torch.bfloat16, False),
    ],
)
def test_varlen_attention(target, dtype, varlen):
    assert target.varlen_attention(dtype) is varlen


@pytest.mark.parametrize(
    ("target", "dtype", "wide"),
    [(PROCESSOR, torch.float32, True), (PROCESSOR, torch.float64, False), (HOPPER, torch.float32, False)],
)
def test_wide_attention(target, dtype, wide):
    assert target.wide_attention(dtype) is wide


def test_cuda_without_a_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        find_target("cuda", 0)
    assert find_target("auto", 3).kind == "cpu"
    assert find_target("cpu", 0).memory_bytes > 1 << 28


def test_more_ranks_than_devices_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="asks for GPU 2, this machine has 2") as caught:
        find_target("auto", 2)
    assert caught.value.remedy == "set trainer.n_gpus_per_node=2"
