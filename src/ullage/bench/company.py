"""How many samples change with the company they are decoded in, where a device rounds products by their shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ullage.base.seeds import derive
from ullage.batch.pack import Limits
from ullage.bench.clock import free
from ullage.bench.shapes import shaped_model
from ullage.model.target import Target
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sample, Sampling

TOGETHER, APART = 64, 7
"""Samples decoded at once."""


def company(target: Target, shape: str, *, prompt: int = 100, response: int = 256) -> Iterator[dict[str, Any]]:
    """Rows of the default and of the deterministic mode: the same samples, all at once and a few at a time."""
    free(target)
    model = shaped_model(shape, target)
    vocabulary = model.module.config.get_text_config().vocab_size
    chance = torch.Generator().manual_seed(1)
    prompts = torch.randint(10, vocabulary, (TOGETHER, prompt), generator=chance).tolist()
    requests = [GroupRequest(prompt=tuple(ids), seeds=(derive(i),)) for i, ids in enumerate(prompts)]
    sampling = Sampling(max_tokens=response, ignore_eos=True)
    for deterministic in (False, True):
        engine = Engine(model, slots=TOGETHER, max_length=prompt + response, deterministic=deterministic)
        together = engine.generate(requests, sampling)
        few = Limits(max_tokens=engine.limits.max_tokens, max_sequences=APART)
        apart = engine.generate(requests, sampling, limits=few)
        yield {
            "shape": shape,
            "dtype": str(model.dtype).removeprefix("torch."),
            "mode": "deterministic" if deterministic else "default",
            "decoded_at_once": [TOGETHER, APART],
            **differing(together, apart),
        }


def differing(these: Sequence[Sample], those: Sequence[Sample]) -> dict[str, float]:
    """Shares of samples, and of tokens from the first that differs on."""
    pairs = [(a.token_ids, b.token_ids) for a, b in zip(these, those, strict=True)]
    alike = [next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0])) for pair in pairs]
    total = sum(len(tokens) for tokens, _ in pairs)
    return {
        "differing_samples_percent": round(100 * sum(a != b for a, b in pairs) / len(pairs), 2),
        "differing_tokens_percent": round(100 * (1 - sum(alike) / total), 2),
        "first_difference": min(alike),
    }
