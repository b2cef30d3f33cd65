"""Numbers and rules that are often quoted, and what is true instead: by the planner where it is a number."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.config.tree import Config
from ullage.planner import components as c
from ullage.planner.components import Pass
from ullage.planner.documents.page import Page
from ullage.planner.documents.recipes import ADAPTERS, CONTEXT, FOUR_SAMPLES, ONE_SEQUENCE
from ullage.planner.documents.worked import Settings, gib, term_table, worked
from ullage.planner.hardware import find_gpu, instances
from ullage.planner.model_shape import find_shape

GB = 1e9
SEVEN = "Llama-2-7B"
Row = tuple[str, str]


def page() -> Page:
    made = Page(
        "often_quoted",
        "Often quoted, in fact",
        f"GB are 10^9 bytes here, because the quotes are. Unless a row says otherwise: {SEVEN}, one sequence of "
        f"{CONTEXT} tokens, bf16 weights and gradients, AdamW with float32 moments and a float32 master, LoRA of rank "
        "16 on all linear layers; planned numbers are what torch allocates, measured ones were measured on one H200 "
        "with a plain training step (whole logits, states in bf16 where said).",
    )
    rows = [*_memory(made), *_activations(made), *_methods(made), *_machines(made), *_learning()]
    made.table(["often quoted", "in fact"], rows)
    return made


def _allocated(made: Page, title: str, settings: Settings, model: str = SEVEN) -> str:
    done = worked(model, settings)
    return made.cell(f"{done.allocated_bytes / GB:.1f} GB", title, done.explained())


def _bytes(made: Page, title: str, *terms: c.Term, digits: int = 1) -> str:
    total = sum(term.bytes for term in terms)
    return made.cell(f"{total / GB:.{digits}f} GB", title, term_table(terms))


def _one(made: Page, title: str, **memory: object) -> str:
    keys = {f"memory.{key}": value for key, value in memory.items()}
    return _allocated(made, title, ONE_SEQUENCE | keys)


def _lora(made: Page, title: str, **memory: object) -> str:
    keys = {f"memory.{key}": value for key, value in memory.items()}
    return _allocated(made, title, ONE_SEQUENCE | ADAPTERS | keys)


def _memory(made: Page) -> Iterator[Row]:
    shape = find_shape(SEVEN)
    count = shape.parameters
    weights, grads, moments, master = (
        c.weights(shape),
        c.gradients(count, "weights"),
        c.moments(count, "adamw"),
        c.master(count),
    )
    halves = c.term("optimizer", 4 * count, "4 B x P: two moments in bf16", P=count)
    bf16 = _bytes(made, "7B, everything in bf16", weights, grads, halves)
    wide = _bytes(made, "7B, bf16 with float32 moments", weights, grads, moments)
    full = _bytes(made, "7B, bf16 with float32 moments and master", weights, grads, moments, master)
    kept, again = (
        _one(made, "7B, all parameters, no recompute", recompute="none"),
        _one(made, "7B, all parameters, recompute", recompute="full"),
    )
    lora_kept, lora_again = (
        _lora(made, "7B, LoRA, no recompute", recompute="none"),
        _lora(made, "7B, LoRA, recompute", recompute="full"),
    )
    yield (
        "Total memory = sum of all components",
        "The peak is a maximum over phases. Recompute takes LoRA of a 7B model from "
        f"{lora_kept} to {lora_again} (measured: 26.4 and 15.5), all parameters only from {kept} to {again}; with "
        "states in bf16 it was measured to change nothing (54.5 GB both ways), because the optimizer's step binds.",
    )
    yield (
        "Adam's states = parameters x parameter size x 2",
        f"Only where states have the parameters' dtype: {bf16} for 7B with weights and gradients. Float32 moments and "
        f"a float32 master are 12 B a parameter beside bf16 weights: {full} (measured: 54.5 and 108.9).",
    )
    eight = c.moments(10**9, "adamw_8bit")
    yield (
        "8-bit Adam = parameters x 1 byte",
        f"Two moments of a byte and a float32 scale for every {c.BLOCK_8BIT}: {c.moment_bytes('adamw_8bit'):.2f} B a "
        f"parameter, {_bytes(made, '8-bit moments of a billion parameters', eight, digits=2)} for a billion.",
    )
    yield (
        "Full fine-tuning of 7B: 56 GB (or 84.5 GB)",
        f"Three recipes: {bf16} all in bf16, {wide} with float32 moments, {full} with a float32 master too; before any "
        "activation. Always name the recipe.",
    )
    yield (
        "Communication buffers = parameters x size x sharding factor",
        "Sharding (FSDP) keeps one or two gathered layers, the next one on its way, reduce-scatter buffers and NCCL's "
        f"own; an external engine on the same GPU a bucket for weights. Here every GPU has a whole replica and "
        f"NCCL {gib(c.NCCL)}.",
    )
    yield (
        "FSDP takes 20 to 30 % less than tensor parallelism; multipliers 4-6x, 2-3x, 1.5-2x",
        "They have no source and are no constants. Ask for your config: `ullage plan`.",
    )
    yield (
        "`empty_cache()` cures fragmentation",
        "`expandable_segments` does more, and not fragmenting does most: large buffers are allocated once, at their "
        "final size.",
    )


def _activations(made: Page) -> Iterator[Row]:
    shape, a = find_shape("Qwen2.5-7B"), Pass(tokens=8192, positions=8192)
    none = c.activations(shape, a, recomputed=0, matmuls=False, leaving=0)
    again = c.activations(shape, a, recomputed=shape.layers, matmuls=False, leaving=0)
    yield (
        "Activations = batch x sequence x hidden x layers x bytes",
        "That is the residual stream, which stays under full recompute. Qwen2.5-7B, 8192 tokens: "
        f"{_bytes(made, 'Activations, recomputed', again)} so, {_bytes(made, 'Activations, kept', none)} without "
        f"recompute, {none.bytes / again.bytes:.0f} times as much.",
    )
    whole = 16384 * shape.vocabulary
    head = c.head_forward(shape, Pass(tokens=16384, positions=16384))
    yield (
        "(no term for logits)",
        f"Tokens x vocabulary x 2 to 12 bytes: {2 * whole / GB:.0f} to {12 * whole / GB:.0f} GB for 16k tokens and "
        f"{shape.vocabulary:,} words. In chunks, as here, {_bytes(made, 'Logits of 16k tokens, in chunks', head)}.",
    )
    peaks = [worked(SEVEN, ONE_SEQUENCE | {"memory.recompute": how}).allocated_bytes for how in ("none", "full")]
    yield (
        "Gradient checkpointing saves 50-75 % (or 60 %), activation offload 60-80 %",
        f"Of the activations kept between layers, recompute saves {1 - again.bytes / none.bytes:.0%} (Qwen2.5-7B, 8192 "
        f"tokens); of the peak {1 - peaks[1] / peaks[0]:.0%} ({SEVEN}, all parameters, {CONTEXT} tokens). Both depend "
        "on the shape: [table](levers.md).",
    )
    times = []
    for model in ("Llama-3.1-8B", "Qwen2.5-0.5B", "Llama-3.1-70B"):
        other = find_shape(model)
        times.append(f"{4 * other.layers * other.hidden / other.kv_bytes_per_token:.0f} x for {model}")
    yield (
        "The KV cache has the hidden size",
        f"It has key-value heads x head size; the hidden size is too much by {', '.join(times)}.",
    )
    yield (
        "The KV cache is a cost of training",
        "It exists in the rollout only. Here it lies in the gradients' memory, where it fits there, and adds nothing.",
    )
    cache = c.kv_cache(find_shape(SEVEN), slots=8, longest=CONTEXT, tokens=8 * CONTEXT)
    yield (
        "Inference: 7 more sequences cost 4 GB at 7B",
        f"8 sequences of {CONTEXT} tokens are {_bytes(made, 'KV cache of 8 sequences', cache)} at {SEVEN}; 7 of them "
        f"{7 * cache.bytes / 8 / GB:.1f} GB.",
    )


def _methods(made: Page) -> Iterator[Row]:
    large, thirteen = find_shape("Llama-3.1-70B"), find_shape("Llama-2-13B")
    yield (
        "70B with LoRA on 80 GB",
        f"Its bf16 weights alone are {_bytes(made, '70B, weights', c.weights(large))}; in NF4 they are "
        f"{_bytes(made, '70B, weights in NF4', c.weights(large, quantisation='nf4'))}. It takes 4-bit weights, several "
        "GPUs that share them, or layers that are streamed; the first is what Ullage has.",
    )
    rollout = worked(SEVEN, ONE_SEQUENCE | ADAPTERS).phase("rollout").allocated_bytes
    yield (
        'LoRA of 7B with "maximum efficiency": 12 GB',
        f"Impossible: bf16 weights alone are {_bytes(made, '7B, weights', c.weights(find_shape(SEVEN)))}. Even to "
        f"sample takes {rollout / GB:.1f} GB (measured: 14.2).",
    )
    yield (
        "LoRA of 7B without checkpointing: 20 GB",
        f"{_lora(made, '7B, LoRA, no recompute', recompute='none')} (measured: 26.4).",
    )
    yield (
        "GRPO or GSPO with LoRA at 7B: 45 GB",
        f"{_allocated(made, '7B, GRPO, LoRA, 4 samples', FOUR_SAMPLES | ADAPTERS)} for a prompt of 512 tokens and 4 "
        "samples of 256, KV cache included (measured: 16.3 for training and 1.6 of KV cache).",
    )
    yield (
        "13B with LoRA: 26 GB",
        f"That is its bf16 weights ({_bytes(made, '13B, weights', c.weights(thirteen))}) and nothing else. Planned "
        f"with recompute: {_allocated(made, '13B, LoRA', ONE_SEQUENCE | ADAPTERS, 'Llama-2-13B')}.",
    )


def _machines(made: Page) -> Iterator[Row]:
    rates = ", ".join(f"{name} {find_gpu(name).tflops_bf16:,.0f}" for name in ("A100 80GB SXM", "H100 SXM", "RTX 4090"))
    yield (
        "FP16 TFLOP/s: A100 77.9, H100 267.6, RTX 4090 82.6",
        f"Those are not the rates of tensor cores. Dense bf16: {rates} ([all](hardware.md)).",
    )
    [price] = [each for each in instances() if each.provider == "Lambda" and each.name == "gpu_1x_a100"]
    told = f"List price on {price.date}: {price.source}"
    yield (
        "Lambda rents out an A100 at $1.10 an hour",
        f"{made.cell(f'${price.price:.2f}', 'Price of an A100 at Lambda', told)} on {price.date}. Prices carry a date, "
        "and are a file that you can update.",
    )
    card = find_gpu("A10G")
    yield (
        "A10G and other 24 GB cards have 24 GB",
        f"24 GB are not 24 GiB: an A10G can use {gib(card.memory_bytes)} of {gib(card.total_bytes)}. GiB and the "
        "usable part are what counts.",
    )
    yield (
        "vLLM's `gpu_memory_utilization` is the share it may use",
        "vLLM means a share of the *total* memory, SGLang of what is *free*; the same number asks for different "
        "amounts.",
    )
    yield (
        "Tables of tokens/s and hours by model size",
        "They have no source. Ours are measured, with hardware and date, by commands that anyone can run: "
        "[needing less memory](../memory.md).",
    )


def _learning() -> Iterator[Row]:
    defaults = Config().algorithm
    yield (
        "Unstable? Raise the clip range to 0.3",
        "That usually makes it worse. Lower the learning rate, look at the reward and at `rollout/logprob_gap_mean`, "
        "and widen only the upper side (`clip_ratio_high`, DAPO).",
    )
    yield (
        "GRPO is a ranking of relative preferences",
        "Rewards normalised within the group of a prompt's samples are the advantages; the loss is PPO's clipped one; "
        "there is no critic.",
    )
    yield (
        "The KL penalty is computed under `no_grad` and added to the loss",
        "It then has no gradient and does nothing. KL in the loss needs its gradient; KL in the reward does not.",
    )
    yield (
        "`ppo_mini_batch_size` counts sequences",
        "In verl, and here, it counts prompts (x n samples, ÷ ranks); micro-batch sizes count sequences; token limits "
        "are for each GPU.",
    )
    yield (
        "GAE: gamma 0.99, lambda 0.95",
        f"verl's defaults are 1.0 and 1.0, and so are they here ({defaults.gamma} and {defaults.lam}); both settings "
        "work.",
    )
    yield (
        "Critic and reward model are sequence classifiers with one label",
        "A reward model gives a score for a sequence, a critic a value for every token.",
    )
    yield (
        "`actor.learning_rate`, `clip_epsilon`, `kl_coef`, `model.fsdp_config`",
        "Other names of `actor.optim.lr`, `actor.clip_ratio`, `actor.kl_loss_coef` or `algorithm.kl_ctrl.kl_coef`, and "
        "`actor.fsdp_config`; configs that use them load.",
    )
