"""Memory by model size: training with every method, inference, and worked examples of a 7B model."""

from __future__ import annotations

from ullage.planner import components as c
from ullage.planner.documents.page import Page
from ullage.planner.documents.recipes import (
    ADAPTERS,
    CONTEXT,
    FOUR_SAMPLES,
    ONE_SEQUENCE,
    RANK,
    SIZES,
    kinds,
    named,
    roomy,
    spare,
)
from ullage.planner.documents.worked import GIB, gib, term_table, worked
from ullage.planner.model_shape import find_shape

RECIPE = (
    f"Recipe of both tables: context {CONTEXT} (512 prompt + 1536 response tokens), 64 prompts x 8 samples a step, one "
    "GPU; bf16 weights and gradients, AdamW with float32 moments and a float32 master (12 B a trained parameter); "
    f"adapters of rank {RANK} on all linear layers; QLoRA: frozen weights in NF4. PPO has a critic of the actor's "
    "size, with adapters where the actor has them. Rollout on the same GPU by the embedded engine. All numbers are "
    "what a device must have free: context of CUDA and 3 % slack of the allocator included."
)
EXAMPLES: tuple[tuple[str, dict[str, object]], ...] = (
    ("full, everything in float32", {"memory.recompute": "full", "actor_rollout_ref.model.dtype": "float32"}),
    ("full, float32 master, recompute", {"memory.recompute": "full"}),
    ("full, float32 master, no recompute", {"memory.recompute": "none"}),
    ("full, no master (stochastic rounding)", {"memory.recompute": "full", "memory.rounding": "stochastic"}),
    (
        "full, no master, 8-bit AdamW",
        {
            "memory.recompute": "full",
            "memory.rounding": "stochastic",
            "actor_rollout_ref.actor.optim.optimizer": "adamw_8bit",
        },
    ),
    ("full, state streamed from the host", {"memory.recompute": "full", "memory.optimizer_state": "streamed"}),
    (
        "full, state and gradients on the host",
        {"memory.recompute": "full", "memory.optimizer_state": "streamed", "memory.gradients": "host"},
    ),
    ("LoRA, no recompute", {**ADAPTERS, "memory.recompute": "none"}),
    ("LoRA, recompute", {**ADAPTERS, "memory.recompute": "full"}),
    ("QLoRA, no recompute", {**ADAPTERS, "actor_rollout_ref.model.quantization": "nf4", "memory.recompute": "none"}),
    ("QLoRA, recompute", {**ADAPTERS, "actor_rollout_ref.model.quantization": "nf4", "memory.recompute": "full"}),
)
DTYPES: tuple[tuple[str, c.Quantisation | None], ...] = (("bf16", None), ("int8", "int8"), ("NF4", "nf4"))
BATCHES = (1, 8, 32)
PARTS = ("weights", "gradients", "optimizer", "master", "activations", "head")


def page() -> Page:
    made = Page("sizes", "Memory by model size", "Every number links to its formula, inputs and command.")
    _training(made)
    _parts(made)
    _examples(made)
    _inference(made)
    return made


def _training(made: Page) -> None:
    head = ["size", "model", *(named(*kind) for kind in kinds())]
    made.say(
        "## Training",
        RECIPE,
        "**The least**: optimizer state streamed from the host, gradients, activations and waiting models there too, "
        "one sequence in a pass, 8 sequences decoded at once. What is learned is the same; a step can take many "
        "times as long.",
    )
    made.table(head, [[size, model, *_row(made, model, "the least")] for size, model in SIZES])
    made.say("**With room**: everything on the device, layers recomputed, 64 sequences decoded at once.")
    made.table(head, [[size, model, *_row(made, model, "with room")] for size, model in SIZES])
    made.say(
        "On a given GPU the planner takes what lies between: `ullage plan MODEL --gpu NAME`. Every GPU holds a whole "
        "replica for now: several make a step faster, not smaller. Where a number exceeds every device, it says how "
        "far away that is. Llama-2-7B and 13B are dearer than newer models of their size because every one of their "
        "heads has keys and values of its own."
    )


def _row(made: Page, model: str, how: str) -> list[str]:
    cells = []
    for kind in kinds():
        settings = (spare if how == "the least" else roomy)(model, *kind)
        title = f"{model}, {named(*kind)}, {how}"
        cells.append(made.peak(worked(model, settings), title))
    return cells


def _parts(made: Page) -> None:
    made.say(
        "## What it is made of",
        "GRPO with all parameters, with room: components of the update, and the peak. The KV cache is that of 64 "
        f"sequences of {CONTEXT} tokens; it lies in the gradients' memory where it fits there, and what it adds to the "
        "peak where it does not is in brackets.",
    )
    rows = []
    for size, model in (each for each in SIZES if each[0] in ("3B", "8B", "32B", "70B")):
        settings = roomy(model, "full", "grpo")
        done, title = worked(model, settings), f"{model}, {named('full', 'grpo')}, with room"
        parts = done.phase("update").components
        shape = find_shape(model)
        cache = c.kv_cache(shape, slots=64, longest=CONTEXT, tokens=None)
        cells = [made.cell(gib(parts.get(name, 0)), title, done.explained()) for name in PARTS]
        held = made.cell(gib(cache.bytes), f"{model}, KV cache of 64 sequences", term_table([cache]))
        added = gib(done.phase("rollout").components.get("kv_cache", 0))
        rows.append([size, *cells, f"{held} ({added})", made.peak(done, title)])
    made.table(["size", *(name.replace("_", " ") for name in PARTS), "KV cache", "peak"], rows)


def _examples(made: Page) -> None:
    made.say(
        "## A 7B model, worked",
        f"Llama-2-7B and 13B, one sequence of {CONTEXT} tokens in a pass, nothing else: what tables of fine-tuning "
        f"call `batch 1, sequence {CONTEXT}`. bf16 weights and gradients, AdamW with float32 moments; LoRA of rank "
        f"{RANK}.",
    )
    rows = []
    for name, keys in EXAMPLES:
        cells = []
        for model in ("Llama-2-7B", "Llama-2-13B"):
            cells.append(made.peak(worked(model, ONE_SEQUENCE | keys), f"{model}, {name}"))
        rows.append([name, *cells, f"`{worked('Llama-2-7B', ONE_SEQUENCE | keys).binding.name}`"])
    made.table(["configuration", "7B", "13B", "binds at 7B"], rows)
    done = worked("Llama-2-7B", FOUR_SAMPLES | ADAPTERS)
    made.say(
        f"GRPO with LoRA, a prompt of 512 tokens and 4 samples of 256, one in a pass: "
        f"{made.peak(done, 'Llama-2-7B, GRPO of 4 samples')}, of which the KV cache of all of them is "
        f"{gib(done.phase('rollout').components['kv_cache'])}."
    )


def _inference(made: Page) -> None:
    made.say(
        "## Inference",
        f"Weights and a KV cache of so many sequences of {CONTEXT} tokens, bf16, in pages of 16 tokens; nothing else "
        "(a server adds about 1 GiB for its context and buffers). Quantised: linear layers below the head.",
    )
    rows = []
    for model in ("Qwen2.5-0.5B", "Qwen2.5-3B", "Llama-2-7B", "Llama-3.1-8B", "Llama-2-13B", "Llama-3.1-70B"):
        shape = find_shape(model)
        for name, quantisation in DTYPES:
            row = [model, name]
            for batch in BATCHES:
                held = c.weights(shape, quantisation=quantisation)
                tokens = batch * CONTEXT
                cache = c.kv_cache(shape, slots=batch, longest=CONTEXT, tokens=tokens)
                title = f"{model} {name}, batch {batch}"
                text = term_table([held, cache])
                row.append(made.cell(f"{(held.bytes + cache.bytes) / GIB:,.2f} GiB", title, text))
            rows.append(row)
    made.table(["model", "weights", *(f"batch {batch}" for batch in BATCHES)], rows)
    made.say(
        "Llama-2-7B and 13B have as many key-value heads as heads; newer models share them, and their cache is four to "
        "eight times smaller."
    )
