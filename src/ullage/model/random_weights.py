"""Models with random weights, made on their device from a Hugging Face config: no files are needed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ullage.model import attention
from ullage.model.fast_decoder import siblings
from ullage.model.language_model import LanguageModel, find_head
from ullage.model.lora import linear_layers
from ullage.model.probe import cache_shape
from ullage.model.quantise import Quantisation, quantise_layers
from ullage.model.side_by_side import lay_side_by_side
from ullage.model.target import Target


def random_model(
    config: PretrainedConfig,
    target: Target,
    *,
    dtype: torch.dtype | None = None,
    quantization: Quantisation | None = None,
) -> LanguageModel:
    """Ready for the trainer and the engine; it has no tokenizer and never ends a sample by itself."""
    wanted = dtype or target.default_dtype
    if quantization is None:
        module = random_module(config, wanted, target.device)
    else:
        module = _quantised_module(config, wanted, target.device, quantization)
    return language_model(module, target, wanted, quantization)


def random_module(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, *, implementation: str = attention.NAME
) -> PreTrainedModel:
    """A causal language model of that shape."""
    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    module.eval()
    assert isinstance(module, PreTrainedModel), "what the factory makes"
    return module


def language_model(
    module: PreTrainedModel, target: Target, dtype: torch.dtype, quantization: Quantisation | None = None
) -> LanguageModel:
    """A module of random weights as the trainer wants it."""
    if target.kind == "cuda":
        lay_side_by_side(siblings(module), target.device, dtype)
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # where the weights lay before is too small for much else
    return LanguageModel(
        module=module,
        tokenizer=None,
        head=find_head(module, fused=target.fused_head(dtype)),
        target=target,
        dtype=dtype,
        quantization=quantization,
        stop_ids=frozenset({-1}),
        cache_shape=cache_shape(module),
    )


def _quantised_module(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, kind: Quantisation
) -> PreTrainedModel:
    """Layer by layer, so that the whole model is never there in its wide form."""
    with _disable_current_modes():  # whoever watches what is allocated must not see a placeholder
        module = random_module(config, dtype, torch.device("meta"))
    chosen = set(linear_layers(module))
    for layer_name in [name for name, _ in module.named_modules()]:
        layer = module.get_submodule(layer_name)
        for key, parameter in list(layer.named_parameters(recurse=False)):
            fresh = torch.empty(parameter.shape, dtype=dtype, device=device)
            fresh.fill_(1.0) if parameter.ndim == 1 else fresh.normal_(std=0.02)
            setattr(layer, key, torch.nn.Parameter(fresh, requires_grad=False))
        if layer_name in chosen:
            quantise_layers(module, [layer_name], kind, device)
    trunk: Any = module.base_model
    with device:
        trunk.rotary_emb = type(trunk.rotary_emb)(config=module.config)
    module.tie_weights()
    return module
