"""Operators that a GPU calls directly and a trace sees."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.model.kernels.operator import operator


@operator("ullage_test::doubled", mutates_args=("total",))
def doubled(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total += x.sum()
    return x * 2


@doubled.register_fake
def _(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_trace_sees_one_operator_and_runs_nothing():
    x, total = torch.empty(3, device="meta"), torch.empty((), device="meta")
    with Names() as names:
        out = doubled(x, total)
    assert names.seen[0] == "ullage_test::doubled"
    assert "aten::mul.Tensor" not in names.seen
    assert (out.shape, out.device.type) == ((3,), "meta")


def test_elsewhere_torch_is_asked():
    x, total = torch.tensor([1.0, 2.0]), torch.tensor(1.0)
    with Names() as names:
        out = doubled(x, total)
    assert (out.tolist(), total.item()) == ([2.0, 4.0], 4.0)
    assert names.seen[0] == "ullage_test::doubled"
    torch.library.opcheck(doubled.registered, (x, total), test_utils=("test_schema", "test_faketensor"))
