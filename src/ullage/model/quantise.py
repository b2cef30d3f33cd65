"""Frozen linear layers whose weights are kept in 4 or 8 bits (QLoRA, arXiv:2305.14314), in the formats of bitsandbytes.

A product makes the plain weight, uses it and forgets it; the backward pass makes it again. NF4 takes 0.516 bytes a
weight, int8 one byte and four a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Quantisation = Literal["nf4", "int8"]
BLOCK = 64
"""Weights, in the order of memory, that share a scale."""
NESTED_BLOCK = 256
"""Scales that share a scale of their own."""
CHUNK = 1 << 22
"""Weights quantised at once, whole blocks: what is in between takes several times their memory."""
SMALLEST = torch.finfo(torch.float32).tiny
"""Stands for the largest of a block of zeros."""
# Quantiles of a normal distribution with an exact zero, scaled to [-1, 1]: appendix E of the paper.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _dynamic_map() -> tuple[float, ...]:
    """256 values of 8 bits whose range and precision share them (arXiv:1511.04561): a sign, a power of ten as a row
    of zeros, and a fraction in what is left: the middles of as many equal parts of [0.1, 1]."""
    values = [0.0, 1.0]
    for fraction_bits in range(7):
        edges = torch.linspace(0.1, 1, 2**fraction_bits + 1, dtype=torch.float32)
        middles = (10.0 ** (fraction_bits - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += middles + [-middle for middle in middles]
    return tuple(sorted(values))


DYNAMIC_MAP = _dynamic_map()


class NF4Weight(nn.Module):
    """A weight in blocks of 64: four bits each, their largest magnitude in 8 bits less the mean of all of them."""

    values: Tensor
    """[16] float32, what codes stand for; the next [256] likewise for codes of scales."""
    nested_values: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        codes, largest = zip(*(_quantise_blocks(part) for part in weight.flatten().split(CHUNK)), strict=True)
        absmax = torch.cat(largest)
        offset = absmax.mean()
        nested, nested_absmax = _to_codes(absmax - offset, DYNAMIC_MAP, NESTED_BLOCK)
        self.codes = _frozen(torch.cat(codes))
        """[weights / 2] uint8, the first of two in the high bits."""
        self.absmax = _frozen(nested)
        """[blocks] uint8, codes of the dynamic map."""
        self.nested_absmax = _frozen(nested_absmax)
        """[blocks / 256] float32"""
        self.offset = _frozen(offset)
        """[] float32"""
        for name, values in (("values", NF4), ("nested_values", DYNAMIC_MAP)):
            self.register_buffer(name, torch.tensor(values, device=weight.device), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[out, in] the weight that the codes stand for."""
        tensors = self.codes, self.absmax, self.nested_absmax, self.offset, self.values, self.nested_values
        if self.device.type != "cpu":
            from ullage.model.kernels.nf4 import nf4_dequantise

            flat: Tensor = nf4_dequantise(*tensors, self.shape.numel(), dtype)
        else:
            flat = nf4_dequantise_plain(*tensors, self.shape.numel(), dtype)
        return flat.view(self.shape)


class Int8Weight(nn.Module):
    """A weight in signed bytes, each row scaled by its largest magnitude over 127."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape, self.dtype = weight.shape, weight.dtype
        rows = max(1, CHUNK // weight.shape[1])
        codes, largest = zip(*(_quantise_rows(part) for part in weight.split(rows)), strict=True)
        self.codes = _frozen(torch.cat(codes))
        """[out, in] int8"""
        self.absmax = _frozen(torch.cat(largest))
        """[out] float32"""

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """[out, in] the weight that the codes stand for."""
        return (self.codes * self.absmax[:, None]).mul_(1 / 127).to(dtype)


KINDS: dict[Quantisation, type[NF4Weight] | type[Int8Weight]] = {"nf4": NF4Weight, "int8": Int8Weight}


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight is one of the above; only its bias could be trained."""

    def __init__(self, plain: nn.Linear, weight: NF4Weight | Int8Weight) -> None:
        nn.Module.__init__(self)  # not Linear's, which would make weights of its own
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight: NF4Weight | Int8Weight = weight  # type: ignore[assignment]  # the place of the plain one
        self.bias = plain.bias
        self.train(plain.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name in torch
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor | NF4Weight | Int8Weight, bias: Tensor | None) -> Tensor:
    """`x weight^T + bias`, whatever the weight is kept in."""
    if isinstance(weight, Tensor):
        return functional.linear(x, weight, bias)
    product: Tensor = _FrozenLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return product


def plain_weight(layer: nn.Linear) -> Tensor:
    """[out, in] the weight that the layer multiplies with, in the dtype of its model."""
    weight: Tensor | NF4Weight | Int8Weight = layer.weight
    return weight if isinstance(weight, Tensor) else weight.dequantised(weight.dtype)


def quantise_layers(module: nn.Module, layers: Iterable[str], kind: Quantisation, device: torch.device) -> None:
    """Replace linear layers by quantised ones on the device; one plain weight at a time is there."""
    for name in layers:
        plain = module.get_submodule(name)
        assert isinstance(plain, nn.Linear), "linear layers only"
        module.set_submodule(name, QuantisedLinear(plain, KINDS[kind](plain.weight.detach().to(device))))


class _FrozenLinear(torch.autograd.Function):
    """Keeps nothing of its own for the backward pass: the codes are the layer's."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: NF4Weight | Int8Weight, bias: Tensor | None) -> Tensor:  # noqa: ANN401 -- autograd's own
        context.weight = weight
        return functional.linear(x, weight.dequantised(x.dtype), bias)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:  # noqa: ANN401
        needs_x, _, needs_bias = context.needs_input_grad
        x_grad = grad @ context.weight.dequantised(grad.dtype) if needs_x else None
        return x_grad, None, grad.flatten(0, -2).sum(0) if needs_bias else None


def nf4_dequantise_plain(
    codes: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor,
    offset: Tensor,
    values: Tensor,
    nested_values: Tensor,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """[size] weights; `values` and `nested_values` are what codes of weights and of scales stand for."""
    scales = nested_values[absmax.int()] * nested_absmax.repeat_interleave(NESTED_BLOCK)[: len(absmax)] + offset
    places = torch.stack((codes >> 4, codes & 15), -1).flatten().int()
    weights = functional.pad(values[places], (0, len(scales) * BLOCK - len(places))).view(-1, BLOCK)
    return weights.mul_(scales[:, None]).flatten()[:size].to(dtype)


def _quantise_blocks(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes of a run of blocks, and the largest magnitude of each."""
    codes, largest = _to_codes(flat.float(), NF4, BLOCK)
    pairs = functional.pad(codes, (0, len(codes) % 2), value=NF4.index(0.0)).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1], largest


def _quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    largest = weight.abs().amax(1).float()
    scale = torch.where(largest == 0, 0.0, 127 / largest)
    return (weight.float() * scale[:, None]).round().to(torch.int8), largest


def _to_codes(flat: Tensor, values: tuple[float, ...], block: int) -> tuple[Tensor, Tensor]:
    """Each block scaled by its largest magnitude: places of the nearest of the sorted values, and what is largest.

    bitsandbytes does the same on a GPU. On an x86 CPU its library first rounds to a grid of 65536 steps, and finds a
    neighbour for one scale in five hundred.
    """
    blocks = functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    largest = blocks.abs().amax(1)
    scaled = (blocks * (1 / largest.clamp(min=SMALLEST))[:, None]).clamp(-1, 1)
    sorted_values = torch.tensor(values, device=flat.device)
    middles = (sorted_values[:-1] + sorted_values[1:]) / 2
    return torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8).flatten()[: len(flat)], largest


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
