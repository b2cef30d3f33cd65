"""Every tiny architecture: packed log-probs, cached decoding and greedy tokens equal those of the model's own code."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM

from experience_samples import load, rollouts_of, stay_double, tokens
from ullage.batch.pack import Limits
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.workers.passes import stage_logprobs

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "gpt2",
    "gemma2",
    "gemma3_text",
    "qwen3_moe",
    "mixtral",
)
TEMPERATURE = 0.8
MAX_TOKENS = 20
PROMPT_LENGTHS = (1, 23, 16, 5, 33)
"""Shorter and longer than a page and than the sliding window, both 16."""


@functools.cache
def sampled(folder):
    """Samples of the engine in float64: (ours, theirs, prompts, samples)."""
    ours = load(folder)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = [tokens(generator, length) for length in PROMPT_LENGTHS]
    engine = Engine(ours, slots=4, max_length=max(PROMPT_LENGTHS) + MAX_TOKENS)
    requests = [GroupRequest(prompt=prompt, seeds=(1, 2, 3)) for prompt in prompts]
    with stay_double():
        samples = engine.generate(requests, Sampling(temperature=TEMPERATURE, max_tokens=MAX_TOKENS))
    return ours, theirs, prompts, samples


@torch.no_grad()
def own_logprobs(theirs, prompts, samples, width):
    """One sequence at a time through the model's own attention."""
    out = torch.zeros(len(samples), width, dtype=torch.float64)
    with stay_double():
        for row, sample in zip(out, samples, strict=True):
            prompt = prompts[sample.group]
            ids = torch.tensor([prompt + sample.token_ids])
            logprobs = (theirs(ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
            row[: len(sample.token_ids)] = logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return out


@pytest.mark.invariant
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logprobs_equal_the_models_own(tiny_architecture, architecture):
    ours, theirs, prompts, samples = sampled(tiny_architecture(architecture))
    assert max(len(sample.token_ids) for sample in samples) > 16
    stage = rollouts_of(prompts, samples)
    want = own_logprobs(theirs, prompts, samples, stage.mask_NT.shape[1])
    valid = torch.ones(len(samples), dtype=torch.bool)
    experience = stage.scored(rewards_N=torch.zeros(len(samples)), valid_N=valid)
    for share_prefix in (True, False):
        limits = Limits(max_tokens=200, share_prefix=share_prefix)
        with stay_double():
            packed = stage_logprobs(experience, [torch.arange(len(samples))], ours, limits, TEMPERATURE)
        torch.testing.assert_close(packed, want, rtol=0, atol=1e-10)
        torch.testing.assert_close(stage.rollout_logprobs_NT, packed, rtol=0, atol=1e-9)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_generate(tiny_architecture, architecture):
    ours, theirs, prompts, _ = sampled(tiny_architecture(architecture))
    engine = Engine(ours, slots=3, max_length=max(PROMPT_LENGTHS) + MAX_TOKENS)
    requests = [GroupRequest(prompt=prompt, seeds=(0,)) for prompt in prompts]
    with stay_double():
        greedy = engine.generate(requests, Sampling(temperature=0, max_tokens=MAX_TOKENS))
        for prompt, sample in zip(prompts, greedy, strict=True):
            ids = torch.tensor([prompt])
            want = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=0
            )
            assert list(sample.token_ids) == want[0, len(prompt) :].tolist()
