"""The engine on fused layers draws what it draws on the layers of transformers."""

import pytest
import torch
from transformers import AutoConfig

from ullage.model.fast_decoder import FastDecoder
from ullage.model.random_weights import random_model
from ullage.model.target import Target
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling

CPU = Target("cpu", 0, (0, 0), 8 << 30)
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_tokens_and_logprobs_are_those_of_the_plain_layers(kind):
    model = random_model(AutoConfig.for_model(kind, **SIZES), CPU, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    requests = [GroupRequest(prompt=tuple(range(3, 3 + n)), seeds=(n, n + 1)) for n in (1, 5, 17)]
    drawn = {}
    for temperature in (0.0, 1.0):
        for fused in (False, True):
            engine = Engine(model, slots=4, max_length=40)
            assert engine.decoder.fast is None, "on a CPU nothing is gained"
            engine.decoder.fast = FastDecoder(model) if fused else None
            drawn[temperature, fused] = engine.generate(
                requests, Sampling(temperature=temperature, max_tokens=12, ignore_eos=True)
            )
    for temperature in (0.0, 1.0):
        plain, fast = drawn[temperature, False], drawn[temperature, True]
        assert [sample.token_ids for sample in fast] == [sample.token_ids for sample in plain]
        for one, other in zip(fast, plain, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
