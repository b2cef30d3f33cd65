"""A loaded causal language model: hidden states, log-probs of packed samples, and saving."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ullage.base.errors import ModelError
from ullage.model.adapter_files import write_adapter
from ullage.model.head import Head
from ullage.model.lora import linear_layers
from ullage.model.packing import Packed
from ullage.model.probe import CacheShape
from ullage.model.side_by_side import apart
from ullage.model.trunk import Trunk


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel(Trunk):
    """Weights, tokenizer and the target they live on. Trainer and rollout engine hold the same one."""

    tokenizer: Any
    head: Head
    stop_ids: frozenset[int]
    """Every end-of-sequence id that the model, its generation config or its tokenizer names."""
    cache_shape: CacheShape

    def logprobs(self, packed: Packed, *, temperature: float, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-prob (and entropy) of every target of a micro-batch: [M], [M]."""
        hidden = self.hidden(packed.input_ids, packed.positions, packed.layout)[packed.predict_from]
        return self.head.logprobs(
            hidden, packed.targets, temperature=temperature, entropy=entropy, supports=packed.supports
        )

    def save(self, folder: Path) -> None:
        """What training changes: a Hugging Face folder, or a PEFT folder where only an adapter is trained."""
        if self.adapters is None or self.adapter is None:
            self.save_merged(folder)
            return
        layers = linear_layers(self.module)
        write_adapter(folder, self.adapters.detached(self.adapter), self.source, layers, self.quantization)
        self._save_tokenizer(folder)

    def save_merged(self, folder: Path) -> None:
        """A Hugging Face folder that `transformers` and `vllm serve` load, an adapter added into its weights."""
        state = self.module.state_dict()
        if self.adapters is not None and self.adapter is not None:
            state = self.adapters.merged_state(self.adapter)
        self.module.save_pretrained(folder, state_dict=apart(state), safe_serialization=True)
        self._save_tokenizer(folder)

    def _save_tokenizer(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        mask = os.umask(0)
        os.umask(mask)
        for path in folder.iterdir():  # safetensors makes its files private
            path.chmod(0o666 & ~mask)


def find_head(module: PreTrainedModel, *, fused: bool = False) -> Head:
    """The output projection, with the logit transforms this architecture's config names."""
    linear = module.get_output_embeddings()
    if linear is None:
        raise ModelError(f"{type(module).__name__} has no language-model head", "choose a causal language model")
    config = module.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(
        weight=linear.weight,
        bias=getattr(linear, "bias", None),
        scale=scale,
        softcap=getattr(config, "final_logit_softcapping", None),
        fused=fused,
    )


def find_stop_ids(module: PreTrainedModel, tokenizer: Any) -> frozenset[int]:  # noqa: ANN401
    """All ids that end a sample. Sampling settings of the generation config are deliberately not read."""
    found: set[int] = set()
    generation = getattr(module, "generation_config", None)
    for holder in (generation, module.config, module.config.get_text_config(), tokenizer):
        value = getattr(holder, "eos_token_id", None)
        found.update(value if isinstance(value, (list, tuple)) else [value] if value is not None else [])
    if not found:
        raise ModelError("neither the model nor its tokenizer names an end-of-sequence token", "set eos_token in it")
    return frozenset(found)
