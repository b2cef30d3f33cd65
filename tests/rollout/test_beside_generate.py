"""Greedy tokens in float32 on a CPU are those of transformers' own `generate`, however the engine batches them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from experience_samples import load, tokens
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling

MAX_TOKENS = 24
PROMPT_LENGTHS = (1, 15, 16, 17, 33)
"""Around pages and sliding windows, both of 16 tokens."""


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"])
def test_greedy_tokens_in_float32(tiny_architecture, architecture):
    folder = tiny_architecture(architecture)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    prompts = [tokens(generator, length) for length in PROMPT_LENGTHS]
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS, pad_token_id=0
        )
        want.append(out[0, len(prompt) :].tolist())
    assert sum(map(len, want)) > 3 * MAX_TOKENS, "they do not all end at once"
    requests = [GroupRequest(prompt=prompt, seeds=(0,)) for prompt in prompts]
    model = load(folder, "float32")
    for given in ({"slots": 5}, {"slots": 2, "window": 7}, {"slots": 5, "window": 4, "cache_tokens": 96}):
        engine = Engine(model, max_length=max(PROMPT_LENGTHS) + MAX_TOKENS, **given)
        greedy = engine.generate(requests, Sampling(temperature=0, max_tokens=MAX_TOKENS))
        assert [list(sample.token_ids) for sample in greedy] == want, given
