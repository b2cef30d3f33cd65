"""The part of a model below its output head: packed tokens in, hidden states out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ullage.base.errors import ModelError
from ullage.model.attention import Layout
from ullage.model.lora import Adapter, Adapters
from ullage.model.quantise import Quantisation
from ullage.model.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """Weights and the target they live on. Trunks of several roles can share one module, each with its own adapter."""

    module: PreTrainedModel
    target: Target
    dtype: torch.dtype
    source: str = ""
    """What it was loaded from."""
    quantization: Quantisation | None = None
    """What its linear layers are kept in, where that is not their dtype."""
    adapters: Adapters | None = None
    """All adapters of the module, where it has any."""
    adapter: str | None = None
    """The one that this trunk runs with; none: the module's own weights alone."""

    def hidden(self, input_ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """[tokens, D] last hidden states of one packed row."""
        if self.adapters is not None:
            # It stays selected: layers that recompute in the backward pass must meet the same one.
            self.adapters.select(self.adapter)
        out = self.module.base_model(input_ids=input_ids, position_ids=positions, use_cache=False, layout=layout)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def adapted(self, name: str, adapter: Adapter) -> Self:
        """The same module, from now on frozen, with one more adapter: the only thing this trunk trains."""
        # Where attention is computed in float64 so that packing changes nothing, thin products need it too.
        adapters = self.adapters or Adapters(self.module, wide=self.target.wide_attention(self.dtype))
        adapters.attach(name, adapter, self.dtype)
        return replace(self, adapters=adapters, adapter=name)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What an update may change: the adapter, or without adapters every weight."""
        if self.adapters is not None:
            return self.adapters.named_parameters(self.adapter)
        return self.module.named_parameters()

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder blocks, in order."""
        stacks = [module for module in self.module.base_model.children() if isinstance(module, torch.nn.ModuleList)]
        count = self.module.config.get_text_config().num_hidden_layers
        for stack in stacks:
            if len(stack) == count:
                return list(stack)
        raise ModelError(f"{type(self.module).__name__} has no list of {count} decoder layers", "report its name")
