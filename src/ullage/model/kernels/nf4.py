"""Weights from their NF4 codes as an operator: every code and scale is read once, every weight written once.

The kernel is in `nf4_triton.py`, its plain-torch twin in `model/quantise.py`, with the format.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("ullage::nf4_dequantise", mutates_args=())
def nf4_dequantise(
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
    from ullage.model.kernels.nf4_triton import dequantise  # a trace needs only shapes

    out = torch.empty(size, dtype=dtype, device=codes.device)
    dequantise(codes, absmax, nested_absmax, offset, values, nested_values, out)
    return out


@nf4_dequantise.register_fake
def _(
    codes: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor,
    offset: Tensor,
    values: Tensor,
    nested_values: Tensor,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    del absmax, nested_absmax, offset, values, nested_values
    return torch.empty(size, dtype=dtype, device=codes.device)
