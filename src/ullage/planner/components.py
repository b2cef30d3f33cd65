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
PREFILL_TOKENS, PREFILL_ELEMENTS = 16384, 1 << 24
"""Prompt tokens of one prefill pass, or elements of their hidden states (rollout/embedded/engine.py)."""
SLAB = 64 * MIB
"""Host memory for activations grows by this much (engine/offload.py)."""
LEAST_MOVED = MIB
"""Smaller tensors stay on the device (engine/offload.py)."""
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
PROCESS = int(1.86 * GIB)
"""Host memory of a rank with torch, CUDA and transformers loaded: 1.84 to 1.86 GiB in four steps with an H200."""

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


def buffers(*, backward: bool, ranks: int, captured: bool = False) -> Term:
    """cuBLAS workspaces, one more for the queue that steps are captured on, and NCCL where there are several ranks."""
    threads, queues = 2 if backward else 1, int(captured)
    count = (threads + queues) * WORKSPACE + (NCCL if ranks > 1 else 0)
    formula = "32 MiB x (threads + queues that capture) + NCCL with several ranks"
    return term("buffers", count, formula, threads=threads, queues=queues, ranks=ranks)


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
    more_keys: int = 0
    """Keys beside the tokens' own: those of a prompt are gathered once more for each of its samples."""


def saved_by_layer(shape: Shape, a: Pass) -> float:
    """What autograd keeps of one decoder layer, in bytes.

    Eager: T (16 h + 4 q + 4 k + 8 i + 4 n + 8): two norms with a float32 copy each, queries, keys, values, output and
    its normalisers, and four tensors of the MLP's width (facts of a trace, exact to 0.05 %). Two frozen norms keep
    4 h less; norms of queries and keys add 6 (q + k), frozen 4. Keys and values that several samples share are gathered
    for each of them and kept so (model/attention.py): 4 k for each such token. Compiled: T (8 h + 4 q + 4 k + 4 i +
    4 n + 8), update_h200_speed.json within 0.1 %, or 6 i with the gated product. By traces of transformers' layers
    (tests/run/test_sharded_trace.py): latent attention adds 8 B for each compressed number and its expanded keys and
    values; experts add 4 h for each that a token goes through (sent there, and coming back) and 6 E + 34 K of routing.
    """
    h, n = shape.hidden, shape.heads
    attention = 2 * (shape.query + shape.values) + 2 * (shape.keys + shape.kv_heads * shape.head_size) + 4 * n
    norms = 8 * h if a.compiled else (12 if a.rank else 16) * h
    if shape.qk_norm and not a.compiled:
        norms += (4 if a.rank else 6) * (shape.query + shape.keys)
    wide = (4 if shape.remakes else 6) if a.compiled else 8
    if shape.kv_lora_rank:
        attention += 8 * (shape.kv_lora_rank + shape.q_lora_rank) + 8 + 4 * shape.values
    per_token = norms + attention + wide * mlp_width(shape) + 8 + 14 * a.rank
    if shape.experts:
        per_token += 6 * shape.experts + shape.experts_per_token * (4 * h + 34)
    gathered = a.more_keys * 2 * (shape.keys + shape.kv_heads * shape.head_size)
    return (a.tokens * per_token + gathered) * a.width / 2


def mlp_width(shape: Shape) -> int:
    """Width that a token meets in the widest kind of layer."""
    if not shape.experts:
        return shape.mlp
    return max(shape.experts_per_token * shape.expert_mlp + shape.shared_mlp, shape.mlp if shape.dense_layers else 0)


def kept_by_recompute(shape: Shape, a: Pass, *, matmuls: bool) -> float:
    """A layer that runs again keeps its input, T x h; with `matmuls` all but what is cheap to make again.

    That is what `saved_by_layer` counts, less the insides and results of norms, whose inputs stay, and two of the four
    tensors of the MLP's width (engine/remake.py). Layers of other makes keep the results of attention, with its
    normalisers, and of each linear layer; of an adapted one three: its own, the adapter's and the thin one between.
    """
    h = shape.hidden
    if not matmuls:
        return a.tokens * 2 * h * a.width / 2
    if not shape.remakes:
        linear = 2 * (shape.query + shape.keys + shape.kv_heads * shape.head_size + 2 * h) + 4 * mlp_width(shape)
        products = (2 * linear + 14 * a.rank if a.rank else linear) + 2 * shape.values + 4 * shape.heads
        return a.tokens * (2 * h + products) * a.width / 2
    remade = (8 if a.rank else 12) * h + 4 * mlp_width(shape) + 8
    if shape.qk_norm:
        remade += (2 if a.rank else 4) * (shape.query + shape.keys)
    return saved_by_layer(shape, a) - a.tokens * remade * a.width / 2


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


def working_layer(shape: Shape, a: Pass, *, recomputed: bool) -> Term:
    """A layer in its backward pass: what it computed again, gradients of three MLP tensors and two hidden ones.

    So compiled layers, experts, and layers that are gathered (tests/run/test_sharded_trace.py); those of `Stack` need
    less, for autograd frees one tensor of the MLP before it makes the next.
    """
    again = saved_by_layer(shape, a) if recomputed else 0.0
    passing = a.tokens * a.width * (3 * mlp_width(shape) + 2 * shape.hidden)
    if not a.rank:  # the gradient of all experts at once, when what they saved is already gone
        gone = a.tokens * shape.experts_per_token * (shape.hidden + 2 * shape.expert_mlp)
        passing = max(passing, a.width * (shape.fused_experts - gone))
    return term(
        "working_layer",
        again + passing,
        "saved of one layer, run again + max(2 B x T (3 i + 2 h), experts' gradient)",
        T=a.tokens,
        again=again,
        passing=passing,
    )


def forward_layer(shape: Shape, a: Pass, quantisation: Quantisation | None = None) -> Term:
    """Without gradients: three tensors of the MLP's width, three hidden ones, and an adapter's own result.

    Experts have a fourth, for gate and up are one tensor, the hidden states that were sent to them, and 4 E + 8 K of
    routing. A quantised weight is wide when one tensor of the MLP less is there, and is made when two are missing.
    """
    each = a.tokens * a.width * mlp_width(shape)
    sent, routing = shape.experts_per_token * shape.hidden, 4 * shape.experts + 8 * shape.experts_per_token
    count = (4 if a.rank or shape.experts else 3) * each + a.tokens * (a.width * (3 * shape.hidden + sent) + routing)
    if quantisation is not None:
        plain, made = (dequantised(shape, width=width).bytes for width in (a.width, made_width(quantisation, a.width)))
        count = max(count, count - each + plain, count - 2 * each + made)
    formula = "2 B x T (4 i + 3 h + K h)" if shape.experts else "2 B x T (3 i + 3 h)"
    return term("working_layer", count, formula, T=a.tokens, i=mlp_width(shape), h=shape.hidden)


def embedded(shape: Shape, a: Pass) -> Term:
    """Embeddings of tokens and positions, which transformers holds until all layers are through."""
    each = a.width * (shape.hidden + 2 * (shape.head_size + shape.rope_head_size))
    return term("working_layer", a.tokens * each, "2 B x T (h + 2 d), embeddings", T=a.tokens, h=shape.hidden)


def dequantised(shape: Shape, *, width: int = 2) -> Term:
    """The one linear layer that is wide at the moment."""
    largest = max(layer.size for _, layer in shape.linears)
    return term("working_layer", width * largest, "2 B x largest linear layer, in its plain form", largest=largest)


def made_width(quantisation: Quantisation, width: int) -> int:
    """Bytes of a number where a weight is made wide: from int8 it is float32 first (model/quantise.py)."""
    return width + (4 if quantisation == "int8" else 0)


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

    Beside it, hidden states, their gradient, and what the last norm keeps: 4 h M + (6 h + 4) T, or 4 h where it is
    frozen.
    """
    chunk, each = min(HEAD_CHUNK, a.positions), a.width * shape.hidden
    logits = 4 * chunk * shape.vocabulary
    peak = max(logits + 4 * shape.table, (4 + a.width) * shape.table) if trained else logits
    count = peak + 2 * each * a.positions + ((3 if trained else 2) * each + 4) * a.tokens
    return term(
        "head",
        count,
        ("max(4 B x chunk x V + 4 B x V h, 6 B x V h) + " if trained else "4 B x chunk x V + ") + "4 h M + last norm",
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
    """Tied weights: the head's gradient waits for the embedding's."""
    return term("head", width * shape.table, "2 B x V h, the head's gradient waits", V=shape.vocabulary, h=shape.hidden)


def tables_gradient(shape: Shape, *, width: int = 2, tied: bool) -> Term:
    """The end of a backward pass: the embedding's gradient; of tied weights the head's too, and their sum."""
    count = width * shape.table
    return term("head", 3 * count if tied else count, "2 B x V h, thrice where tied", V=shape.vocabulary)


def less(smaller: Term, what: str, larger: str) -> Term:
    """A moment that needs less than another one of its phase: shown, not counted."""
    return replace(smaller, bytes=0, formula=f"{what}: {smaller.bytes:,} B, less than {larger}; {smaller.formula}")


# --- the optimizer's step ---


def step_transient(kind: Optimizer, *, width: int = 2) -> Term:
    """Nothing where one kernel does it all; else copies of one piece: a wide gradient, 24 B more for 8-bit moments."""
    if width == 2:
        return term("optimizer", 0, "nothing: one kernel steps in place")
    each = 4 + (24 if kind == "adamw_8bit" else 0)
    return term("optimizer", each * PIECE, f"{each} B x piece", piece=PIECE)
