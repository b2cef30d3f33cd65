"""In float32 on a CPU a sample is its prompt, its seed and its settings: nothing else that an engine may do shows."""

import random

import pytest
import torch

from experience_samples import load, tokens
from ullage.batch.pack import Limits
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling

MAX_LENGTH = 33 + 40
PROMPT_LENGTHS = (2, 16, 19, 33)
SAMPLES = 3
SETTINGS = (
    Sampling(max_tokens=40),
    Sampling(max_tokens=23, temperature=0.3, ignore_eos=True),
    Sampling(max_tokens=31, temperature=1.4, top_p=0.8),
    Sampling(max_tokens=40, temperature=0.7, top_k=9, top_p=0.95),
)
"""One for each prompt."""


def prompts_and_seeds():
    generator = torch.Generator().manual_seed(11)
    return [(tokens(generator, length), [1000 * length + i for i in range(SAMPLES)]) for length in PROMPT_LENGTHS]


def drawn(model, wanted, *, prefill=4096, **given):
    """Tokens by prompt and seed of those `(prompt, seeds)`, which come in one by one while others run."""
    engine = Engine(model, max_length=MAX_LENGTH, **given)
    session = engine.session(Limits(max_tokens=prefill, max_sequences=given["slots"]))
    waiting, found = list(wanted), {}
    try:
        while waiting or not session.idle:
            if waiting:
                group, prompt, seeds = waiting.pop()
                session.submit((group, tuple(seeds)), GroupRequest(prompt=prompt, seeds=tuple(seeds)), SETTINGS[group])
            for part in session.advance():
                group, seeds = part.key
                ids, logprobs = found.setdefault((group, seeds[part.index]), ([], []))
                ids += part.token_ids
                logprobs += part.logprobs
    finally:
        session.close()
    assert engine.pages.free == engine.pages.total
    return found


def any_company(chance):
    """Some of the samples of some of the prompts, in any order; the samples of a prompt together or apart."""
    wanted = []
    for group, (prompt, seeds) in enumerate(prompts_and_seeds()):
        some = chance.sample(seeds, chance.randint(0, SAMPLES))
        cut = chance.randint(0, len(some))
        wanted += [(group, prompt, part) for part in (some[:cut], some[cut:]) if part]
    chance.shuffle(wanted)
    return wanted


@pytest.mark.invariant
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2"])
def test_any_company_slots_window_and_cache(tiny_architecture, architecture):
    model = load(tiny_architecture(architecture), "float32")
    everybody = [(group, prompt, seeds) for group, (prompt, seeds) in enumerate(prompts_and_seeds())]
    want = drawn(model, everybody, slots=12)
    assert len(want) == 12
    chance = random.Random(architecture)
    tight = {"slots": 12, "window": 4, "cache_tokens": 16 * 9}  # samples make room for others and are prefilled again
    check(drawn(model, everybody, **tight), want, tight)
    for _ in range(3):
        given = {
            "slots": chance.choice((1, 2, 5, 12, 40)),
            "window": chance.choice((1, 2, 5, 16)),
            "cache_tokens": chance.choice((None, 16 * 6, 16 * 9)),
            "prefill": chance.choice((1, 20, 4096)),
            "deterministic": chance.random() < 0.2,
        }
        check(drawn(model, any_company(chance), **given), want, given)


def check(got, want, given):
    for key, (ids, logprobs) in got.items():
        assert ids == want[key][0], (key, given)
        # Not every CPU rounds a row alike in all company.
        assert logprobs == pytest.approx(want[key][1], rel=0, abs=2e-6), (key, given)
