"""What the engine draws is distributed as the model says: chi-square of whole samples against transformers."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from experience_samples import load
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling

COUNT = 6000
PROMPT = (5, 9, 4, 30, 12)
TEMPERATURE = 0.1


@pytest.fixture(scope="module")
def models(tiny_model):
    """Ours and theirs."""
    return load(tiny_model, "float32"), AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@torch.no_grad()
def probabilities(theirs, sampling):
    """[V, V] of the first token and the one after it."""

    def after(rows):
        logits = theirs(torch.tensor(rows)).logits[:, -1].double() / TEMPERATURE
        if sampling.top_k > 0:
            least = logits.topk(sampling.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        return logits.softmax(-1)

    vocabulary = theirs.config.vocab_size
    first = after([PROMPT])[0]
    return first[:, None] * after([(*PROMPT, token) for token in range(vocabulary)])


@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}])
def test_pairs_of_tokens(models, truncation):
    ours, theirs = models
    sampling = Sampling(max_tokens=2, temperature=TEMPERATURE, ignore_eos=True, **truncation)
    engine = Engine(ours, slots=500, max_length=8)
    samples = engine.generate([GroupRequest(prompt=PROMPT, seeds=tuple(range(COUNT)))], sampling)
    chances = probabilities(theirs, sampling)
    assert chances.max() > 3 / chances.numel(), "far from equal"
    counts = torch.zeros_like(chances)
    for sample in samples:
        counts[sample.token_ids] += 1
    assert counts[chances == 0].sum() == 0
    # Pairs that are expected less than five times count as one.
    often = chances * COUNT >= 5
    expected = torch.cat([chances[often], chances[~often].sum()[None]]) * COUNT
    found = torch.cat([counts[often], counts[~often].sum()[None]])
    cells = expected > 0
    chi_square = ((found - expected)[cells] ** 2 / expected[cells]).sum().item()
    degrees = int(cells.sum()) - 1
    assert degrees >= 20
    assert abs(chi_square - degrees) / math.sqrt(2 * degrees) < 3, (chi_square, degrees)
