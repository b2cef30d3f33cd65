"""The part of a model below its output head: packed tokens in, hidden states out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ullage.base.errors import ModelError
from ullage.model.attention import Layout
from ullage.model.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """Weights and the target they live on."""

    module: PreTrainedModel
    target: Target
    dtype: torch.dtype

    def hidden(self, input_ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """[tokens, D] last hidden states of one packed row."""
        out = self.module.base_model(input_ids=input_ids, position_ids=positions, use_cache=False, layout=layout)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder blocks, in order."""
        stacks = [module for module in self.module.base_model.children() if isinstance(module, torch.nn.ModuleList)]
        count = self.module.config.get_text_config().num_hidden_layers
        for stack in stacks:
            if len(stack) == count:
                return list(stack)
        raise ModelError(f"{type(self.module).__name__} has no list of {count} decoder layers", "report its name")
