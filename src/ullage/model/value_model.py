"""A value per token: a linear head on hidden states, those of a trunk of its own or of the actor's.

The value of a token comes from the place that predicts it, so it is what the critic expects before the token is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from ullage.base.errors import ModelError
from ullage.model.load import load_trunk
from ullage.model.packing import Packed
from ullage.model.quantise import Quantisation
from ullage.model.target import Target
from ullage.model.trunk import Trunk

HEAD_NAMES = ("score", "classifier")
"""What transformers calls the head of its sequence and token classifiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueModel:
    """Hidden states to values. What it trains is its own: the head and, unless it is the actor's, the trunk, or of
    an adapted trunk the adapter."""

    trunk: Trunk
    weight: Tensor
    """[1, D]"""
    bias: Tensor
    """[1]"""
    shared: bool
    """The trunk is the actor's: read, never trained from here."""

    def values(self, packed: Packed) -> Tensor:
        """[M] value before each target of a micro-batch, in at least float32."""
        with torch.no_grad() if self.shared else nullcontext():
            hidden = self.trunk.hidden(packed.input_ids, packed.positions, packed.layout)[packed.predict_from]
        wide = torch.promote_types(self.trunk.dtype, torch.float32)
        return functional.linear(hidden.to(wide), self.weight.to(wide), self.bias.to(wide))[:, 0]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What an update may change."""
        if not self.shared:
            for name, parameter in self.trunk.named_parameters():
                yield f"trunk.{name}", parameter
        yield "head.weight", self.weight
        yield "head.bias", self.bias

    def tensors(self) -> dict[str, Tensor]:
        """The weights that a checkpoint of the critic holds."""
        return dict(self.named_parameters())

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's weights into place."""
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])


def load_value_model(
    path: str, target: Target, *, dtype: str = "auto", quantization: Quantisation | None = None
) -> ValueModel:
    """A model folder's trunk under a value head: the saved head of a classifier with one output, or zeros."""
    return add_value_head(load_trunk(path, target, dtype=dtype, quantization=quantization))


def add_value_head(trunk: Trunk) -> ValueModel:
    """A value head on a trunk that is trained with it; as above."""
    # One dtype for all that is trained: half precision gets its float32 master from the optimizer.
    model = _with_head(trunk, trunk.dtype, shared=False)
    folder = _folder(trunk.source)
    if folder is not None:
        _read_head(folder, model)
    return model


def share_trunk(trunk: Trunk) -> ValueModel:
    """A value head on the actor's hidden states; its gradient stops at the head."""
    return _with_head(trunk, torch.promote_types(trunk.dtype, torch.float32), shared=True)


def _with_head(trunk: Trunk, dtype: torch.dtype, *, shared: bool) -> ValueModel:
    """Zeros: every value is 0 at first, whatever the seed."""
    size = trunk.module.config.get_text_config().hidden_size
    weight, bias = (
        torch.zeros(shape, dtype=dtype, device=trunk.target.device, requires_grad=True) for shape in ((1, size), (1,))
    )
    return ValueModel(trunk=trunk, weight=weight, bias=bias, shared=shared)


def _folder(path: str) -> Path | None:
    """Where a model's safetensors are; None for GGUF, which has no place for such a head."""
    place = Path(path).expanduser()
    if place.is_dir():
        return place
    if place.suffix == ".gguf" or path.count("/") != 1:
        return None
    return Path(snapshot_download(path, local_files_only=True))  # the trunk was just loaded from there


@torch.no_grad()
def _read_head(folder: Path, model: ValueModel) -> None:
    """Copy the classifier head that the folder's files hold, if they hold one."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = {f"{head}.{part}": part for head in HEAD_NAMES for part in ("weight", "bias")}
            found |= {names[key]: opened.get_tensor(key) for key in opened.keys() if key in names}  # noqa: SIM118
    if "weight" not in found:
        return
    if found["weight"].shape != model.weight.shape:
        shape = "x".join(map(str, found["weight"].shape))
        raise ModelError(
            f"{folder} has a classification head of shape {shape}; a critic needs one output per token (num_labels=1)",
            "give a model with one label or without such a head, or leave critic.model.path out",
        )
    model.weight.copy_(found["weight"])
    if "bias" in found:
        model.bias.copy_(found["bias"])
