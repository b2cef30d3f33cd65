"""The quick decision guide: what a device of some size can train, and what a model needs."""

from __future__ import annotations

from functools import cache

from ullage.planner.documents.page import Page
from ullage.planner.documents.recipes import CONTEXT, SIZES, kinds, named, spare
from ullage.planner.documents.worked import Worked, gib, worked
from ullage.planner.hardware import find_gpu
from ullage.planner.model_shape import bundled_shapes

DEVICES = (
    ("8 GB", "8GB"),
    ("12 GB", "RTX 3060 12GB"),
    ("16 GB", "RTX 4080"),
    ("24 GB", "RTX 4090"),
    ("32 GB", "RTX 5090"),
    ("40 GB", "A100 40GB SXM"),
    ("48 GB", "L40S"),
    ("80 GB", "H100 SXM"),
    ("141 GB", "H200"),
    ("192 GB", "B200"),
)
"""Sizes as cards are sold, and one that is sold so; 8 GB is taken at its word."""


FAMILIES = ("SmolLM2", "Qwen2.5", "Llama-2", "Llama-3.1", "Llama-3.2", "Mistral")
"""Dense models in sizes from small to large."""


def page(sizes: Page) -> Page:
    made = Page(
        "decide",
        "What can I train, and what do I need?",
        f"Context {CONTEXT} (512 + 1536 tokens), 64 prompts x 8 samples, bf16, AdamW with a float32 master, one GPU, "
        "every lever pulled that leaves what is learned alone, host memory taken to suffice: the recipe of "
        "[memory by size](sizes.md), which also says what the same runs need with room. For another context, GPU or "
        "number of GPUs ask `ullage advise --gpu NAME --context TOKENS` or `ullage advise MODEL`.",
        "## I have so much memory: what can I train?",
        f"The largest of {', '.join(FAMILIES)} that fits, and what it then needs. Sold in GB; what a program can use "
        "is the second column.",
    )
    made.table(["sold as", "usable", *(named(*kind) for kind in kinds())], [_having(made, *each) for each in DEVICES])
    made.say(
        "## I want this model: what do I need?",
        "What it needs, and the smallest size in which cards are sold that has it (the cards of the table above).",
    )
    made.table(["model", *(named(*kind) for kind in kinds())], [_wanting(sizes, model) for _, model in SIZES])
    return made


def _having(made: Page, sold: str, name: str) -> list[str]:
    memory = find_gpu(name).memory_bytes
    cells = []
    for kind in kinds():
        model = next((model for model in _models() if _least(model, *kind).peak_bytes <= memory), None)
        cells.append("none" if model is None else _fitting(made, model, *kind))
    device = sold if name == sold.replace(" ", "") else f"{sold} ({name})"
    return [device, gib(memory), *cells]


def _fitting(made: Page, model: str, method: str, algorithm: str) -> str:
    title = f"{model}, {named(method, algorithm)}, the least"
    return f"{model}: {made.peak(_least(model, method, algorithm), title)}"


def _wanting(sizes: Page, model: str) -> list[str]:
    """Explained where the same number stands by size."""
    cells = []
    for kind in kinds():
        needed = _least(model, *kind).peak_bytes
        enough = (sold for sold, name in DEVICES if find_gpu(name).memory_bytes >= needed)
        number = sizes.link(gib(needed), f"{model}, {named(*kind)}, the least")
        cells.append(f"{number}: {next(enough, 'no card')}")
    return [model, *cells]


def _least(model: str, method: str, algorithm: str) -> Worked:
    return worked(model, spare(model, method, algorithm))


@cache
def _models() -> tuple[str, ...]:
    """The largest first."""
    dense = (shape for shape in bundled_shapes().values() if shape.name.startswith(FAMILIES) and not shape.experts)
    return tuple(shape.name for shape in sorted(dense, key=lambda shape: -shape.parameters))
