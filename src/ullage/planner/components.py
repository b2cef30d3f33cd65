"""Bytes of each component of a run by closed form: one function each, with its formula and where that comes from.

Symbols: P parameters trained, h hidden, i MLP width, q k widths of queries and keys, n heads, L layers, V vocabulary,
T tokens of a pass, M positions that carry loss, r rank. Bytes are those of half precision (2) unless a function is
told otherwise. The forms describe Ullage's own code and were checked against benchmarks/results/update_h200_*.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ullage.planner.model_shape import Shape

MIB, GIB = 1 << 20, 1 << 30
PIECE = 1 << 22
"""Elements that the optimizer steps at once (engine/optimizer.py)."""
COURIER_STAGES = 4
"""Pieces of gradients on their way to the host (engine/gradients.py)."""
HEAD_CHUNK = 3072
"""Positions whose logits are alive at once (model/fused_head.py)."""
PAGE = 16
"""Tokens of a page of the KV cache (rollout/embedded/pages.py)."""
PREFILL_TOKENS = 4096
"""Prompt tokens of one prefill pass (rollout/embedded/engine.py)."""
SLAB = 64 * MIB
"""Host memory for activations grows by this much (engine/offload.py)."""
BLOCK_8BIT = 256
"""Moments that share a float32 scale (engine/rules.py)."""
CONTEXT = 783 * MIB
"""CUDA context, cuBLAS and kernel images, outside torch's allocator: 749 to 783 MiB on an H200, CUDA 13."""
WORKSPACE = 32 * MIB
"""cuBLAS workspace of one thread on Hopper, from torch's allocator; the backward pass has a thread of its own."""
NCCL = 650 * MIB
"""NCCL after its first collectives, measured with one rank; it grows with the topology."""
SLACK = 0.03
"""Over what is allocated: with expandable segments 12 of 12 runs went through at 1.015 of their predicted least."""
PROCESS = int(2.5 * GIB)
"""Host memory of a rank with torch, CUDA and transformers loaded: 2 to 3 GB."""

Quantisation = Literal["nf4", "int8"]
Optimizer = Literal["adamw", "adamw_8bit", "sgd"]


@dataclass(frozen=True, slots=True)
class Term:
    """A number of bytes that can explain itself."""

    name: str
    """The component it belongs to."""
    bytes: int
    formula: str
    inputs: Mapping[str, float]

    def explained(self) -> str:
        values = ", ".join(f"{name}={value:,.10g}" for name, value in self.inputs.items())
        return f"{self.formula}  [{values}]" if values else self.formula


def term(name: str, count: float, formula: str, **inputs: float) -> Term:
    return Term(name, math.ceil(count), formula, inputs)


# --- what stays ---


def weights(shape: Shape, *, width: int = 2, quantisation: Quantisation | None = None, head: bool = True) -> Term:
    """All parameters in their dtype; quantised: the linear layers below the head in 4 or 8 bits, the rest as it is.

    NF4: half a byte, a byte of scale for 64 weights and four for 64 x 256 (arXiv:2305.14314); int8: a byte and four for
    each row. Without `head` it is a trunk, such as a critic's.
    """
    count = shape.parameters if head else shape.trunk_parameters
    if quantisation is None:
        return term("weights", width * count, f"{width} B x P", P=count)
    linear = sum(number * layer.size for number, layer in shape.linears)
    rows = sum(number * layer.outputs for number, layer in shape.linears)
    if quantisation == "nf4":
        packed = linear * (0.5 + 1 / 64 + 4 / (64 * 256))
        return term(
            "weights",
            packed + width * (count - linear),
            f"(1/2 + 1/64 + 4/16384) B x linear + {width} B x rest",
            linear=linear,
            rest=count - linear,
        )
    return term(
        "weights",
        linear + 4 * rows + width * (count - linear),
        f"1 B x linear + 4 B x rows + {width} B x rest",
        linear=linear,
        rows=rows,
        rest=count - linear,
    )


def adapter_parameters(shape: Shape, rank: int, targets: Sequence[str] = ("all-linear",)) -> int:
    """r (in + out) for each adapted linear layer (arXiv:2106.09685)."""
    chosen = [
        number * (layer.inputs + layer.outputs)
        for number, layer in shape.linears
        if "all-linear" in targets or layer.name in targets
    ]
    return rank * sum(chosen)


def adapters(parameters: int, rank: int, *, width: int = 2) -> Term:
    return term("weights", width * parameters, f"{width} B x r (in + out) of each adapted layer", r=rank, P=parameters)


def gradients(
    parameters: int, where: Literal["weights", "float32", "host"], *, width: int = 2, largest: int = 0
) -> Term:
    """One flat buffer; where it is wider or elsewhere, beside it the one gradient that is being handed over."""
    if where == "weights":
        return term("gradients", width * parameters, f"{width} B x P", P=parameters)
    if where == "float32":
        formula = f"4 B x P + {width} B x largest parameter"
        return term("gradients", 4 * parameters + width * largest, formula, P=parameters, largest=largest)
    return term("gradients", width * largest, f"{width} B x largest parameter, the rest on the host", largest=largest)


def moment_bytes(kind: Optimizer) -> float:
    """Bytes of optimizer state for a parameter: two float32 moments; two bytes and their scales; nothing."""
    return {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / BLOCK_8BIT), "sgd": 0.0}[kind]


def moments(parameters: int, kind: Optimizer) -> Term:
    return term("optimizer", moment_bytes(kind) * parameters, f"{moment_bytes(kind):g} B x P ({kind})", P=parameters)


def master(parameters: int) -> Term:
    return term("master", 4 * parameters, "4 B x P: the weights in float32", P=parameters)


def staging(per_element: float, largest: int) -> Term:
    """Two stages, each as large as a piece of what rests on the host (engine/placement.py)."""
    piece = min(PIECE, largest)
    return term(
        "optimizer", 2 * per_element * piece, "2 stages x piece x bytes on the host", piece=piece, bytes=per_element
    )


def context() -> Term:
    return term("context", CONTEXT, "CUDA context, cuBLAS, kernels: measured")


def buffers(*, backward: bool, ranks: int) -> Term:
    """cuBLAS workspaces, and NCCL where there are several ranks."""
    threads = 2 if backward else 1
    count = threads * WORKSPACE + (NCCL if ranks > 1 else 0)
    return term("buffers", count, "32 MiB x threads + NCCL with several ranks", threads=threads, ranks=ranks)


# --- the KV cache ---


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def kv_cache(shape: Shape, *, slots: int, longest: int, tokens: int | None, width: int = 2, lent: int = 0) -> Term:
    """2 x L x key-value heads x head size for a token, in pages of 16; nothing where it fits the gradients' memory.

    Every slot has room for its longest sequence and a copy of a partly filled prompt page, unless `tokens` is given.
    """
    pages = pages_for(tokens) if tokens else slots * (pages_for(longest) + 1)
    per_token = shape.kv_bytes_per_token // 2 * width
    count = pages * PAGE * per_token
    if count <= lent:
        return term("kv_cache", 0, f"{count:,} B, lying in the gradients' memory", lent=lent)
    return term("kv_cache", count, "pages x 16 x bytes of a token", pages=pages, bytes=per_token)


# --- a pass ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one forward (and backward) pass holds."""

    tokens: int
    positions: int
    """Those that carry loss."""
    width: int = 2
    """Bytes of a number of the model's dtype."""
    compiled: bool = False
    rank: int = 0
    """Of adapters, where only they are trained: the model's own norms then need no gradient."""


def saved_by_layer(shape: Shape, a: Pass) -> float:
    """What autograd keeps of one decoder layer, in bytes.

    Eager: T (16 h + 4 q + 4 k + 8 i + 4 n + 8): two norms with a float32 copy each, queries, keys, values, output and
    its normalisers, and four tensors of the MLP's width (facts of a trace, exact to 0.05 %). Two frozen norms keep
    4 h less; norms of queries and keys add 6 (q + k). Compiled: T (8 h + 4 q + 4 k + 6 i + 4 n + 8), fitted to
    update_h200_speed.json within 0.4 %. By traces of transformers' layers (tests/run/test_sharded_trace.py): latent
    attention adds 8 B for each compressed number and its expanded keys and values; experts add 4 h for each that a
    token goes through (sent there, and coming back) and 6 E + 34 K of routing.
    """
    h, n = shape.hidden, shape.heads
    attention = 2 * (shape.query + shape.values) + 2 * (shape.keys + shape.kv_heads * shape.head_size) + 4 * n
    norms = 8 * h if a.compiled else (12 if a.rank else 16) * h
    if shape.qk_norm and not a.compiled:
        norms += 6 * (shape.query + shape.keys)
    if shape.kv_lora_rank:
        attention += 8 * (shape.kv_lora_rank + shape.q_lora_rank) + 8 + 4 * shape.values
    per_token = norms + attention + (6 if a.compiled else 8) * mlp_width(shape) + 8 + 14 * a.rank
    if shape.experts:
        per_token += 6 * shape.experts + shape.experts_per_token * (4 * h + 34)
    return a.tokens * per_token * a.width / 2


def mlp_width(shape: Shape) -> int:
    """Width that a token meets in the widest kind of layer."""
    if not shape.experts:
        return shape.mlp
    return max(shape.experts_per_token * shape.expert_mlp + shape.shared_mlp, shape.mlp if shape.dense_layers else 0)


def kept_by_recompute(shape: Shape, a: Pass, *, matmuls: bool) -> float:
    """A layer that runs again keeps its input, T x h; with `matmuls` also the results of matrix products."""
    h = shape.hidden
    per_token = 2 * h
    if matmuls:
        attention = 2 * (shape.query + shape.values + shape.keys + shape.kv_heads * shape.head_size) + 4 * shape.heads
        per_token += attention + 4 * h + 4 * mlp_width(shape)
    return a.tokens * per_token * a.width / 2


def activations(shape: Shape, a: Pass, *, recomputed: int, matmuls: bool, leaving: int) -> Term:
    """The sum over layers of what each keeps until the backward pass, without those whose activations leave.

    Layers that leave are counted at the mean of all, which is exact where all are alike.
    """
    full, light = saved_by_layer(shape, a), kept_by_recompute(shape, a, matmuls=matmuls)
    whole = (shape.layers - recomputed) * full + recomputed * light
    staying = whole * (shape.layers - leaving) / shape.layers
    return term(
        "activations",
        staying,
        "(layers kept x saved + layers recomputed x input) x share that stays",
        T=a.tokens,
        saved=full,
        input=light,
        kept=shape.layers - recomputed,
        recomputed=recomputed,
        leaving=leaving,
    )


def working_layer(shape: Shape, a: Pass, *, recomputed: bool, arriving: float = 0) -> Term:
    """The layer in its backward pass: what it computed again, gradients of three MLP tensors and two hidden ones.

    `arriving`: what is on its way back from the host.
    """
    again = saved_by_layer(shape, a) if recomputed else 0.0
    passing = a.tokens * a.width * (3 * mlp_width(shape) + 2 * shape.hidden)
    if not a.rank:  # the gradient of all experts at once, when what they saved is already gone
        gone = a.tokens * shape.experts_per_token * (shape.hidden + 2 * shape.expert_mlp)
        passing = max(passing, a.width * (shape.fused_experts - gone))
    return term(
        "working_layer",
        again + passing + arriving,
        "saved of one layer, run again + max(2 B x T (3 i + 2 h), experts' gradient) + what returns from the host",
        T=a.tokens,
        again=again,
        passing=passing,
        arriving=arriving,
    )


def forward_layer(shape: Shape, a: Pass) -> Term:
    """Without gradients: three tensors of the MLP's width, three hidden ones, and an adapter's own result.

    Experts have a fourth, for gate and up are one tensor, the hidden states that were sent to them, and 4 E + 8 K of
    routing.
    """
    more = mlp_width(shape) if a.rank or shape.experts else 0
    sent, routing = shape.experts_per_token * shape.hidden, 4 * shape.experts + 8 * shape.experts_per_token
    count = a.tokens * (a.width * (3 * mlp_width(shape) + 3 * shape.hidden + more + sent) + routing)
    formula = "2 B x T (4 i + 3 h + K h)" if shape.experts else "2 B x T (3 i + 3 h)"
    return term("working_layer", count, formula, T=a.tokens, i=mlp_width(shape), h=shape.hidden)


def dequantised(shape: Shape, *, width: int = 2) -> Term:
    """The one linear layer that is wide at the moment."""
    largest = max(layer.size for _, layer in shape.linears)
    return term("working_layer", width * largest, "2 B x largest linear layer, in its plain form", largest=largest)


# --- the output head ---


def head_forward(shape: Shape, a: Pass) -> Term:
    """Logits of one chunk in float32, and the hidden states they come from."""
    chunk = min(HEAD_CHUNK, a.positions)
    count = 4 * chunk * shape.vocabulary + a.width * shape.hidden * (a.tokens + a.positions)
    return term(
        "head",
        count,
        "4 B x chunk x V + 2 B x h (T + M)",
        chunk=chunk,
        V=shape.vocabulary,
        h=shape.hidden,
        M=a.positions,
    )


def head_backward(shape: Shape, a: Pass, *, trained: bool) -> Term:
    """max(chunk of logits + float32 gradient of the weight, that gradient in float32 and as it is handed over).

    Beside it, hidden states, their gradient, and what the last norm keeps: 4 h M + (8 h + 4) T.
    """
    chunk = min(HEAD_CHUNK, a.positions)
    logits = 4 * chunk * shape.vocabulary
    peak = max(logits + 4 * shape.table, (4 + a.width) * shape.table) if trained else logits
    count = peak + 2 * a.width * shape.hidden * a.positions + (8 * shape.hidden + 4) * a.tokens
    return term(
        "head",
        count,
        "max(4 B x chunk x V + 4 B x V h, 6 B x V h) + 4 h M + (8 h + 4) T" if trained else "4 B x chunk x V + ...",
        chunk=chunk,
        V=shape.vocabulary,
        h=shape.hidden,
        T=a.tokens,
        M=a.positions,
    )


def value_head(shape: Shape, a: Pass) -> Term:
    """Hidden states of the positions in float32, and their gradients; the last norm's."""
    count = (8 + 2 * a.width) * shape.hidden * a.positions + (8 * shape.hidden + 4) * a.tokens
    return term("head", count, "12 B x h M + (8 h + 4) T", h=shape.hidden, T=a.tokens, M=a.positions)


def waiting_table(shape: Shape, *, width: int = 2) -> Term:
    """Tied weights: the head's gradient waits for the embedding's, and both are there at the end."""
    return term(
        "head", 2 * width * shape.table, "2 x 2 B x V h, head and embedding", V=shape.vocabulary, h=shape.hidden
    )


def sampling(shape: Shape, *, slots: int, truncated: bool = False, greedy: bool = False) -> Term:
    """Logits, log-probs and two float64 tensors to draw from; sorted once more under top-p or top-k.

    Greedy: logits, log-probs and their exponentials.
    """
    each = 12 if greedy else 48 if truncated else 24
    return term("head", each * slots * shape.vocabulary, f"{each} B x slots x V", slots=slots, V=shape.vocabulary)


def less(smaller: Term, what: str, larger: str) -> Term:
    """A moment that needs less than another one of its phase: shown, not counted."""
    return replace(smaller, bytes=0, formula=f"{what}: {smaller.bytes:,} B, less than {larger}; {smaller.formula}")


# --- the optimizer's step ---


def step_transient(kind: Optimizer, *, rounded: bool) -> Term:
    """Copies of one piece: a wide gradient, 12 B more to round stochastically, 24 B more for 8-bit moments.

    Measured: 16, 64 and 156 MiB for AdamW, rounded SGD, and rounded 8-bit AdamW (update_h200_state.json).
    """
    each = 4 + (12 if rounded else 0) + (24 if kind == "adamw_8bit" else 0)
    return term("optimizer", each * PIECE, f"{each} B x piece", piece=PIECE)
