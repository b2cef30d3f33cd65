"""The invariants of training, measured on one model: a few dozen tokens, every number beside its bound."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ullage.batch.pack import Limits
from ullage.batch.stages import Rollouts
from ullage.config.tree import Data
from ullage.data.chat import tokenise
from ullage.data.prompts import Prompt
from ullage.engine.recompute import recompute_layers
from ullage.model import attention
from ullage.model.language_model import LanguageModel
from ullage.model.load import load_model
from ullage.model.target import find_target
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.run.installation import Check
from ullage.trainer.collect import to_rollouts
from ullage.workers.passes import micro_batches

QUESTIONS = ("What is 12 + 30?", "Name two colours, please.")
LENGTHS = (8, 5, 3)
"""Tokens of the samples of each question: unequal, as real ones are."""
TOGETHER = 1 << 20
"""More tokens than there are: everything in one pass."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far two ways to compute the same number may be apart."""

    mean: float
    """Log-probs, mean distance."""
    most: float
    """Log-probs, largest distance."""
    gradient: float
    """Gradients: norm of the difference over the norm."""


# One unit in the last place of a float32 logit of 20 is 2e-6. The gradient sums over the whole vocabulary, with much
# cancellation: 1e-4 is rounding there, a fault is above 1e-2.
_FLOAT32 = Bounds(5e-6, 5e-5, 1e-3)
BOUNDS = {
    torch.float32: _FLOAT32,
    torch.float64: _FLOAT32,  # transformers normalises in float32 whatever the weights are
    # Half precision keeps 8 bits: other shapes use other kernels, which round differently.
    torch.bfloat16: Bounds(5e-2, 1.0, 1e-1),
}
LIBRARY_FACTOR = 10
"""How much farther transformers' own attention may be, which rounds in its own way."""


def check_model(path: str, *, dtype: str = "auto") -> Iterator[Check]:
    """Load a model and compare every pair of passes that must agree. A model that does not load raises `ModelError`."""
    began = time.monotonic()
    model = load_model(path, find_target("auto", 0), dtype=dtype)
    parameters = sum(parameter.numel() for parameter in model.module.parameters())
    yield Check(
        name="loads",
        status="ok",
        detail=f"{type(model.module).__name__}, {parameters / 1e6:.1f} million parameters, "
        f"{str(model.dtype).removeprefix('torch.')} on {model.target.device}, {time.monotonic() - began:.1f} s",
    )
    yield check_stop_ids(model)
    yield check_template(model.tokenizer)
    yield from check_passes(model)


def check_stop_ids(model: LanguageModel) -> Check:
    """Which tokens end a sample, and whether the chat template ends its turns with one of them."""
    tokenizer = model.tokenizer
    names = ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)!r}" for token in sorted(model.stop_ids))
    ending = turn_ending(tokenizer)
    if ending is None or model.stop_ids & set(tokenizer(ending, add_special_tokens=False)["input_ids"]):
        return Check(name="stop ids", status="ok", detail=names)
    return Check(
        name="stop ids",
        status="warn",
        detail=f"{names}; the chat template ends a turn with {ending!r}, which has none of them",
        remedy="add the turn's end token to eos_token_id in the model's generation_config.json",
    )


def turn_ending(tokenizer: Any) -> str | None:  # noqa: ANN401 -- transformers' own
    """What the chat template writes after a reply; None where that cannot be told."""
    if not tokenizer.chat_template:
        return None
    try:
        text = tokenizer.apply_chat_template(_messages(2), tokenize=False)
    except Exception:  # noqa: BLE001 -- a template is a program of the model's author: `check_template` tells
        return None
    return str(text).rpartition(_messages(2)[1]["content"])[2] or None


def check_template(tokenizer: Any) -> Check:  # noqa: ANN401
    """Whether the chat template renders, and leaves earlier turns alone when later ones follow."""
    name = "chat template"
    if not tokenizer.chat_template:
        remedy = "give prompts as text, or set actor_rollout_ref.model.custom_chat_template"
        return Check(name=name, status="warn", detail="none: chats cannot be rendered", remedy=remedy)
    try:
        asked = tokenizer.apply_chat_template(_messages(1), tokenize=False, add_generation_prompt=True)
        answered = tokenizer.apply_chat_template(_messages(2), tokenize=False)
        asked_again = tokenizer.apply_chat_template(_messages(3), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # noqa: BLE001 -- a template is a program of the model's author: it may raise anything
        remedy = "set actor_rollout_ref.model.custom_chat_template"
        return Check(name=name, status="fail", detail=f"does not render: {error}", remedy=remedy)
    if answered.startswith(asked) and asked_again.startswith(answered):
        return Check(name=name, status="ok", detail="renders, and keeps earlier turns as they are")
    return Check(
        name=name,
        status="warn",
        detail="renders, but changes earlier turns when later ones follow",
        remedy="single turns are not affected; in training over several turns the tokens would not be those sampled",
    )


def _messages(count: int) -> list[dict[str, str]]:
    roles = ("user", "assistant", "user")
    contents = (QUESTIONS[0], "It is 42.", QUESTIONS[1])
    return [{"role": role, "content": content} for role, content in zip(roles[:count], contents, strict=False)]


def check_passes(model: LanguageModel) -> Iterator[Check]:
    """Rollout, packed, shared, recomputed and the model's own pass, on the same samples."""
    bounds = BOUNDS[model.dtype]
    stage = sample(model)
    alone = Limits(max_tokens=TOGETHER, max_sequences=1, share_prefix=False)
    packed = Limits(max_tokens=TOGETHER, share_prefix=False)
    shared = Limits(max_tokens=TOGETHER, share_prefix=True)
    _train_first_and_last_layer(model)
    reference, reference_gradient = logprobs(model, stage, alone)
    mask = stage.mask_NT

    assert stage.rollout_logprobs_NT is not None, "the engine sampled them"
    engine = stage.rollout_logprobs_NT.to(reference.dtype)[mask]
    yield _compare("rollout = trainer", engine, reference[mask], bounds)
    own = Bounds(*(LIBRARY_FACTOR * bound for bound in (bounds.mean, bounds.most, bounds.gradient)))
    yield _compare("packed = its own forward", reference[mask], own_logprobs(model, stage)[mask], own)
    packed_values, packed_gradient = logprobs(model, stage, packed)
    yield _compare(
        "packed = one by one", packed_values[mask], reference[mask], bounds, (packed_gradient, reference_gradient)
    )
    if not model.target.varlen_attention(model.dtype):
        values, gradient = logprobs(model, stage, shared)
        yield _compare(
            "shared prefix = not shared", values[mask], reference[mask], bounds, (gradient, reference_gradient)
        )
    yield check_head_chunks(model, stage, packed, bounds)
    recompute_layers(model.layers)  # last: it stays on
    values, gradient = logprobs(model, stage, packed)
    yield _compare("recomputed = kept", values[mask], packed_values[mask], bounds, (gradient, packed_gradient))


def sample(model: LanguageModel) -> Rollouts:
    """A few samples of the engine's own, cut to unequal lengths."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    asked = chats if model.tokenizer.chat_template else list(QUESTIONS)
    ids = tokenise(asked, Data(), model.tokenizer, places=["doctor"] * len(asked))
    prompts = [
        Prompt(id=number, token_ids=own, prompt=QUESTIONS[number], target=None, source="doctor", extra={})
        for number, own in enumerate(ids)
    ]
    seeds = tuple(range(1, len(LENGTHS) + 1))
    engine = Engine(model, slots=len(prompts) * len(LENGTHS), max_length=max(map(len, ids)) + max(LENGTHS))
    samples = engine.generate(
        [GroupRequest(prompt=own, seeds=seeds) for own in ids],
        Sampling(max_tokens=max(LENGTHS), ignore_eos=True),
    )
    cut = [
        replace(one, token_ids=one.token_ids[: LENGTHS[one.index]], logprobs=one.logprobs[: LENGTHS[one.index]])
        for one in samples
    ]
    return to_rollouts(prompts, range(len(prompts)), cut)


def logprobs(model: LanguageModel, stage: Rollouts, limits: Limits) -> tuple[Tensor, Tensor]:
    """[N, T] log-probs, and the gradient of a weighted sum of them, where parameters have one."""
    count, width = stage.mask_NT.shape
    weights = torch.linspace(-1.0, 1.0, count)[:, None].expand(count, width)
    values = torch.zeros(count, width, dtype=torch.promote_types(model.dtype, torch.float32))
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    for packed, _ in micro_batches(stage, model, limits):
        found, _ = model.logprobs(packed, temperature=1.0)
        scattered = packed.scatter(found, width)
        samples = packed.samples
        (scattered * weights[samples].to(scattered)).sum().backward()
        values[samples] = scattered.detach().to(values)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return values, torch.cat([gradient.flatten().to(values) for gradient in gradients])


@torch.no_grad()
def own_logprobs(model: LanguageModel, stage: Rollouts) -> Tensor:
    """[N, T] log-probs from the model's plain forward pass with transformers' own attention, one sample at a time."""
    values = torch.zeros(stage.mask_NT.shape, dtype=torch.promote_types(model.dtype, torch.float32))
    model.module.set_attn_implementation("eager")
    try:
        for number, response in enumerate(stage.responses):
            prompt = stage.prompts[int(stage.group_N[number])]
            ids = torch.tensor([prompt + response], device=model.target.device)
            logits = model.module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].to(values.dtype)
            found = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
            values[number, : len(response)] = found.cpu()
    finally:
        model.module.set_attn_implementation(attention.NAME)
    return values


def check_head_chunks(model: LanguageModel, stage: Rollouts, limits: Limits, bounds: Bounds) -> Check:
    """The head one position at a time, and all at once."""
    packed, _ = next(micro_batches(stage, model, limits))
    with torch.no_grad():
        hidden = model.hidden(packed.input_ids, packed.positions, packed.layout)[packed.predict_from]
    results = []
    for chunk in (1, len(packed.targets)):
        inputs = hidden.clone().requires_grad_()
        values, _ = model.head.logprobs(inputs, packed.targets, temperature=1.0, entropy=False, chunk=chunk)
        values.square().sum().backward()
        assert inputs.grad is not None, "the head has a gradient"
        results.append((values.detach().cpu(), inputs.grad.to(values.dtype).cpu()))
    (small, small_gradient), (large, large_gradient) = results
    return _compare("head in chunks = whole", small, large, bounds, (small_gradient, large_gradient))


def _train_first_and_last_layer(model: LanguageModel) -> None:
    """Gradients of these two layers pass through all others, without the memory of all others' gradients."""
    model.module.requires_grad_(False)
    for layer in (model.layers[0], model.layers[-1]):
        for parameter in layer.parameters():
            parameter.requires_grad_(parameter.is_floating_point())  # quantised weights have none


def _compare(
    name: str, left: Tensor, right: Tensor, bounds: Bounds, gradients: tuple[Tensor, Tensor] | None = None
) -> Check:
    distance = (left - right).abs()
    measured = [("mean", float(distance.mean()), bounds.mean), ("max", float(distance.max()), bounds.most)]
    if gradients is not None:
        difference = torch.linalg.vector_norm(gradients[0] - gradients[1]) / torch.linalg.vector_norm(gradients[1])
        measured.append(("gradient", float(difference), bounds.gradient))
    detail = ", ".join(f"{what} {value:.1e} (bound {bound:.0e})" for what, value, bound in measured)
    if all(value <= bound for _, value, bound in measured):
        return Check(name=name, status="ok", detail=detail)
    return Check(
        name=name,
        status="fail",
        detail=detail,
        remedy="this architecture is not computed the same way everywhere; please report its name and this line",
    )
