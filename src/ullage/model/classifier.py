"""Sequence classifiers with one output: a Hugging Face folder (safetensors) or a Hub id. Never runs its code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from ullage.base.errors import ModelError
from ullage.model.load import DTYPES, guard, load_tokenizer, refuse_missing, settle, source_of
from ullage.model.target import Target


def load_classifier(
    path: str, target: Target, *, tokenizer_path: str | None = None, dtype: str = "auto"
) -> tuple[PreTrainedModel, Any]:
    """The classifier on its target, frozen, and its tokenizer; problems are `ModelError` (66)."""
    wanted = target.default_dtype if dtype == "auto" else DTYPES[dtype]
    source = source_of(path)
    if "gguf_file" in source:
        raise ModelError(f"{path} is a GGUF file, which has no classification head", "give a Hugging Face folder")
    config = guard(path, lambda: AutoConfig.from_pretrained(**source))
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{path} ({config.model_type}) is an encoder-decoder", "choose an encoder or a decoder")
    if config.num_labels != 1:
        raise ModelError(
            f"{path} has {config.num_labels} labels; a reward model has one output (num_labels=1)",
            "give a sequence classifier that was trained as a reward model",
        )
    tokenizer = load_tokenizer(tokenizer_path or path)
    options = {"config": config, "dtype": wanted, "use_safetensors": True, "output_loading_info": True}
    module, report = guard(path, lambda: AutoModelForSequenceClassification.from_pretrained(**source, **options))
    refuse_missing(path, sorted(report["missing_keys"]))
    settle(module, target, wanted)
    module.requires_grad_(False)
    return module, tokenizer


def max_length(module: PreTrainedModel, tokenizer: Any) -> int | None:  # noqa: ANN401 -- transformers' own
    """Tokens of the longest text that there are positions for; None where nothing says so."""
    limits = [getattr(module.config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length]
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            # RoBERTa and its kin count positions from behind their padding index.
            limits.append(part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    known = [limit for limit in limits if limit is not None and 0 < limit < 1 << 31]  # tokenizers say 1e30 for none
    return min(known, default=None)


@torch.no_grad()
def classify(module: PreTrainedModel, token_ids: Sequence[Sequence[int]], target: Target) -> list[float]:
    """The output for each text, as transformers gives it for the text alone: padding is on the right and masked."""
    with _padding(module, {ids[-1] for ids in token_ids}) as pad:
        shape = len(token_ids), max(map(len, token_ids))
        input_ids, mask = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long)
        for row, ids in enumerate(token_ids):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        logits: Tensor = module(input_ids=input_ids.to(target.device), attention_mask=mask.to(target.device)).logits
    numbers: list[float] = logits[:, 0].double().tolist()
    return numbers


@contextmanager
def _padding(module: PreTrainedModel, last_ids: set[int]) -> Iterator[int]:
    """The token that rows are filled with.

    A decoder reads the last token that is not `pad_token_id`, or the very last one where there is no such id: then it
    is lent one that no text ends with, so that padding changes nothing.
    """
    config = module.config.get_text_config()
    own = config.pad_token_id
    usable = own is not None and 0 <= own < config.vocab_size
    pad = own if usable else next(token for token in count() if token not in last_ids)
    config.pad_token_id = pad
    try:
        yield pad
    finally:
        config.pad_token_id = own
