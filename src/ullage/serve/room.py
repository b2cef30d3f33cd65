"""How much the engine may hold while it serves: slots, the longest sequence, memory for keys and values."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from ullage.base.errors import DoesNotFitError, UsageError
from ullage.base.units import bytes_text
from ullage.model.language_model import LanguageModel
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.pages import PAGE_SIZE, pages_for

DEFAULT_LENGTH = 4096
DEFAULT_SLOTS = {"cpu": 16, "cuda": 128}
SHARE = {"cpu": 0.25, "cuda": 0.8}
"""Of the memory that is free once the weights are loaded."""


def context_of(model: LanguageModel) -> int | None:
    """Positions that the model knows; None where it has no bound."""
    found = getattr(model.module.config.get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


def open_engine(
    model: LanguageModel, *, slots: int | None, max_length: int | None, say: Callable[[str], None]
) -> Engine:
    """An engine whose cache holds all slots at full length, or as much of that as there is memory for."""
    context = context_of(model)
    if max_length is not None and context is not None and max_length > context:
        raise UsageError(f"--max-length {max_length}: the model's context is {context} tokens")
    length = max_length or min(DEFAULT_LENGTH, context or DEFAULT_LENGTH)
    slots = slots or DEFAULT_SLOTS[model.target.kind]
    layers, heads, head_size = model.cache_shape
    per_page = PAGE_SIZE * 2 * layers * heads * head_size * model.dtype.itemsize
    allowed = int(SHARE[model.target.kind] * _free_bytes(model)) // per_page
    per_sequence = pages_for(length) + 1  # as the engine counts: one more for a copy of a partly filled prompt page
    if allowed < per_sequence:
        raise DoesNotFitError(
            f"keys and values of {length} tokens need {bytes_text(per_sequence * per_page)}, "
            f"{bytes_text(allowed * per_page)} may be used",
            "lower --max-length",
        )
    pages = min(slots * per_sequence, allowed)
    return Engine(model, slots=slots, max_length=length, cache_tokens=pages * PAGE_SIZE, say=say)


def _free_bytes(model: LanguageModel) -> int:
    if model.target.kind == "cuda":
        return int(torch.cuda.mem_get_info(model.target.device)[0])
    return int(psutil.virtual_memory().available)
