"""What each lever saves at 7B, and tables of activations, KV cache and logits."""

from __future__ import annotations

from ullage.config.settle import ACTOR_TOKENS, NUM_SLOTS
from ullage.planner import components as c
from ullage.planner.components import Pass
from ullage.planner.documents.page import Page
from ullage.planner.documents.recipes import CONTEXT, OFFLOAD, RANK, base
from ullage.planner.documents.worked import Worked, gib, term_table, worked, written
from ullage.planner.hardware import find_gpu
from ullage.planner.model_shape import find_shape
from ullage.planner.plan import REFERENCE

MODEL = "Qwen2.5-7B"
TOKENS = 8192
SHAPES = ("Qwen2.5-0.5B", "Qwen2.5-3B", "Llama-2-7B", "Qwen2.5-7B", "Llama-3.1-8B", "Qwen2.5-32B", "Llama-3.1-70B")
STEPS: tuple[dict[str, object], ...] = (
    {},
    {"memory.compile": True},
    {"memory.recompute": "matmuls"},
    {"memory.recompute": 0.5},
    {"memory.recompute": "full"},
    {OFFLOAD: "async"},
    {"memory.recompute": "full", OFFLOAD: "async"},
    {"memory.rounding": "stochastic"},
    {"actor_rollout_ref.actor.optim.optimizer": "adamw_8bit"},
    {"memory.optimizer_state": "streamed"},
    {"memory.gradients": "host"},
    {"memory.offload_roles": True},
    {ACTOR_TOKENS: CONTEXT},
    {NUM_SLOTS: 8},
)
"""Each beside a run that keeps everything on the device and recomputes nothing."""


def page() -> Page:
    made = Page("levers", "What levers save, and what passes hold")
    _levers(made)
    _activations(made)
    _kv_cache(made)
    _logits(made)
    return made


def _levers(made: Page) -> None:
    made.say(
        "## One lever at a time, at 7B",
        f"{MODEL}, context {CONTEXT}, 64 prompts x 8 samples, passes of {TOKENS} tokens, bf16, AdamW with a float32 "
        "master; no recompute and everything on the device, but for the one lever. Saved of the activations (with the "
        "working layer and the head) and of the peak are two things: what does not bind saves nothing. Time is that of "
        f"a whole step as predicted for one {find_gpu(REFERENCE).name}, rollout included, whether the run fits or not; "
        "measured times are in [needing less memory](../memory.md).",
    )
    for title, method, algorithm in (
        ("GRPO, all parameters", "full", "grpo"),
        (f"GRPO, LoRA of rank {RANK}", "LoRA", "grpo"),
        ("PPO, all parameters", "full", "ppo"),
    ):
        start = base(method, algorithm) | {"memory.recompute": "none"}
        made.say(f"### {title}")
        rows = [_step(made, title, start, step) for step in STEPS]
        made.table(["lever", "peak", "binds", "saved of the activations", "saved of the peak", "a step"], rows)


def _step(made: Page, title: str, start: dict[str, object], step: dict[str, object]) -> list[str]:
    before, after = worked(MODEL, start), worked(MODEL, start | step)
    change = ", ".join(f"`{text}`" for text in written(step)) or "none"
    saved = before.peak_bytes - after.peak_bytes
    return [
        change,
        made.peak(after, f"{title}: {change.replace('`', '')}"),
        f"`{after.binding.name}`",
        _share(_activations_of(before) - _activations_of(after), _activations_of(before)) if step else "",
        f"{gib(saved)}, {_share(saved, before.peak_bytes)}" if step else "",
        f"{after.step_seconds:.0f} s" + (f", {after.step_seconds / before.step_seconds - 1:+z.0%}" if step else ""),
    ]


def _activations_of(done: Worked) -> int:
    parts = done.phase("update").components
    return sum(parts.get(name, 0) for name in ("activations", "working_layer", "head"))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}"


def _activations(made: Page) -> None:
    made.say(
        "## Activations",
        f"What is kept for the backward pass of {TOKENS} tokens in bf16, eager, all parameters trained: nothing "
        "recomputed, all but matrix products, and everything (the layer's input stays). The often quoted `tokens x "
        "hidden x layers x 2` is the column `full` alone.",
    )
    rows = []
    a = Pass(tokens=TOKENS, positions=TOKENS)
    for model in SHAPES:
        shape = find_shape(model)
        cells = []
        for name, recomputed, matmuls in (
            ("none", 0, False),
            ("matmuls", shape.layers, True),
            ("full", shape.layers, False),
        ):
            term = c.activations(shape, a, recomputed=recomputed, matmuls=matmuls, leaving=0)
            cells.append(made.cell(gib(term.bytes), f"Activations of {model}, {name}", term_table([term])))
        times = c.saved_by_layer(shape, a) / c.kept_by_recompute(shape, a, matmuls=False)
        rows.append([model, f"{c.saved_by_layer(shape, a) / TOKENS:,.0f} B", *cells, f"{times:.0f} x"])
    head = ["model", "a token and layer", "`none`", "`matmuls`", "`full`", "none / full"]
    made.table(head, rows)


def _kv_cache(made: Page) -> None:
    made.say(
        "## KV cache",
        "bf16, pages of 16 tokens; key-value heads x head size, not the hidden size. Only in the rollout, and nothing "
        "where it fits into the gradients' memory.",
    )
    rows = []
    for model in SHAPES:
        shape = find_shape(model)
        cells = []
        for slots, longest in ((8, CONTEXT), (64, CONTEXT), (64, 8192)):
            term = c.kv_cache(shape, slots=slots, longest=longest, tokens=None)
            title = f"KV cache of {model}, {slots} x {longest}"
            cells.append(made.cell(gib(term.bytes), title, term_table([term])))
        quoted = 4 * shape.layers * shape.hidden / shape.kv_bytes_per_token
        rows.append([model, f"{shape.kv_bytes_per_token:,} B", *cells, f"{quoted:.0f} x"])
    head = ["model", "a token", f"8 x {CONTEXT}", f"64 x {CONTEXT}", "64 x 8192", "by hidden size it would be"]
    made.table(head, rows)


def _logits(made: Page) -> None:
    made.say(
        "## Logits",
        "All logits of a pass at once are tokens x vocabulary x 2 bytes in bf16, and up to 12 with a float32 copy, its "
        f"softmax and their gradient. Ullage never makes more than {c.HEAD_CHUNK} rows of them; beside them are the "
        "hidden states and, where the head is trained, its gradient.",
    )
    rows = []
    for model in SHAPES:
        shape = find_shape(model)
        for tokens in (TOKENS, 2 * TOKENS):
            a = Pass(tokens=tokens, positions=tokens)
            whole = tokens * shape.vocabulary
            forward, backward = c.head_forward(shape, a), c.head_backward(shape, a, trained=True)
            text = term_table([forward, backward])
            cells = [
                made.cell(gib(term.bytes), f"Head of {model}, {tokens} tokens", text) for term in (forward, backward)
            ]
            rows.append(
                [model, f"{tokens:,}", f"{shape.vocabulary:,}", f"{gib(2 * whole)} to {gib(12 * whole)}", *cells]
            )
    made.table(["model", "tokens", "vocabulary", "all at once", "here, forward", "here, backward"], rows)
