"""Linear layers of one input as one product: weights that lie one after another in one tensor.

The layers keep their parameters, each a view of its rows: what trains, saves or reads them notices nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from ullage.model.lora import AdaptedLinear


class Joint(NamedTuple):
    """The parameters of all layers, as those of one."""

    weight: Tensor
    bias: Tensor | None


@torch.no_grad()
def lay_side_by_side(groups: Iterable[Sequence[nn.Module]], device: torch.device, dtype: torch.dtype) -> None:
    """Move the plain linear layers of each group there, side by side; what is not plain stays as it is.

    Group by group, so that on one and the same device one group's weights are there twice, not all.
    """
    for group in groups:
        for parts in _parameters(group) or ():
            joint = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=dtype, device=device)
            for part, place in zip(parts, joint.split([len(part) for part in parts]), strict=True):
                place.copy_(part)
                part.data = place


def joint(group: Sequence[nn.Module]) -> Joint | None:
    """Views of all their own parameters, not adapters'; None where they do not lie side by side, or are not plain."""
    parameters = _parameters(group)
    if parameters is None:
        return None
    views = [_joined(parts) for parts in parameters]
    if any(view is None for view in views):
        return None
    weight, bias = (*views, None)[:2]
    assert weight is not None, "just looked"
    return Joint(weight, bias)


def apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same memory as storages of their own; `save_pretrained` would copy tensors that share one."""
    return {
        name: from_dlpack(tensor) if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        for name, tensor in state.items()
    }


def _parameters(group: Sequence[nn.Module]) -> list[list[nn.Parameter]] | None:
    """All weights and, where there are any, all biases; None: quantised or otherwise no plain ones."""
    if not all(type(layer) in (nn.Linear, AdaptedLinear) and type(layer.weight) is nn.Parameter for layer in group):
        return None
    found = [[getattr(layer, name) for layer in group] for name in ("weight", "bias")]
    found = [parts for parts in found if any(part is not None for part in parts)]
    return None if any(part is None for parts in found for part in parts) else found


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """By storages and offsets, which tensors without memory have too."""
    first = parts[0]
    storage, place = first.untyped_storage()._cdata, first.storage_offset()
    for part in parts:
        alike = part.dtype == first.dtype and part.shape[1:] == first.shape[1:] and part.is_contiguous()
        if not alike or part.untyped_storage()._cdata != storage or part.storage_offset() != place:
            return None
        place += part.numel()
    return first.detach().as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())
