"""Liger's fused norms, rotary embeddings and activations in a model's layers, where the extra `liger` is installed."""

from __future__ import annotations

from transformers import PreTrainedModel

from ullage.base.errors import ConfigError
from ullage.model.target import Target


def use_liger(module: PreTrainedModel, target: Target) -> None:
    """Replace operations by fused ones that keep less for the backward pass. The LM head stays ours."""
    if target.kind != "cuda":
        raise ConfigError("memory.liger = true: its kernels run on CUDA only", "set memory.liger=false on this machine")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ConfigError(
            "memory.liger = true: liger-kernel is not installed",
            "pip install 'ullage[liger]', or leave memory.liger out",
        ) from error
    kind = module.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"memory.liger = true: liger-kernel knows no {kind} models", "leave memory.liger out")
    _apply_liger_kernel_to_instance(model=module, cross_entropy=False, fused_linear_cross_entropy=False)
