"""An engine that reads shared beginnings once draws as without it, under Triton's interpreter (`make triton`)."""

import dataclasses
import os
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoConfig

from ullage.model import attention
from ullage.model.kernels import paged
from ullage.model.random_weights import random_model
from ullage.model.target import Target
from ullage.rollout.embedded import decoder, engine, layouts, step
from ullage.rollout.embedded import requests as known
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.sampler import draw
from ullage.rollout.sampling import GroupRequest, Sampling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
pytestmark = [pytest.mark.triton, pytest.mark.skipif(not INTERPRETED, reason="`make triton` runs it, where Triton is")]

CPU = Target("cpu", 0, (0, 0), 8 << 30)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}
SAMPLING = Sampling(max_tokens=9)
REQUESTS = [
    GroupRequest(prompt=tuple(5 + (7 * i + n) % 30 for i in range(n)), seeds=tuple(range(n, n + count)))
    for n, count in [(44, 5), (20, 1), (32, 4), (18, 2)]
]
"""A prompt that ends within a page, one without siblings, one of whole pages, too few siblings."""


@dataclasses.dataclass(frozen=True, slots=True)
class Interpreting(Target):
    """A CPU that runs the kernels for CUDA."""

    def varlen_attention(self, dtype):
        del dtype
        return True


def make_model(target):
    model = random_model(AutoConfig.for_model("qwen2", **SIZES), target, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.4)
    return dataclasses.replace(model, stop_ids=frozenset(range(8, 13)))


@pytest.fixture
def groups(monkeypatch):
    """Of every group that was read together in a step: how many rows, and whether the first still went on."""
    monkeypatch.setattr(known, "SHARED_LEAST", 16)
    monkeypatch.setattr(attention.Sequences, "of", lambda spans, device: None)  # no flash kernel on a CPU
    # What others test takes time here: drawing by kernels, and rows of nobody.
    monkeypatch.setattr(step, "draw", lambda *given, fused, **rest: draw(*given, fused=False, **rest))
    for module in (decoder, engine):
        monkeypatch.setattr(module, "rows_needed", lambda count, model: count)
    found = []

    def noted(query, arena, layer, table, lengths, starts, members, *rest):
        found.extend((int((rows >= 0).sum()), bool(lengths[rows[0]])) for rows in members if rows[0] >= 0)
        out = paged.grouped_paged_attention(query, arena, layer, table, lengths, starts, members, *rest)
        assert out.isfinite().all(), "also for rows whose sample has ended"
        return out

    monkeypatch.setattr(layouts, "grouped_paged_attention", noted)
    return found


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert dataclasses.replace(one, logprobs=()) == dataclasses.replace(other, logprobs=())
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-5)


@pytest.mark.parametrize("given", [{"window": 4}, {"window": 3, "slots": 6}])
def test_shared_beginnings_change_no_token(groups, given):
    """All at once, and in turns; samples end while others of their group go on."""
    model = make_model(Interpreting("cpu", 0, (9, 0), 8 << 30))
    got = Engine(model, **{"slots": 12, "max_length": 64, **given}).generate(REQUESTS, SAMPLING)
    assert set(groups) == {(5, True), (4, True), (5, False), (4, False)}
    assert_same(got, Engine(make_model(CPU), slots=12, max_length=64).generate(REQUESTS, SAMPLING))
    assert {sample.finish_reason for sample in got} == {"stop", "length"}


def test_who_made_room_goes_on_by_itself(groups):
    """With too few pages for all five, the youngest is prefilled again, to pages of its own."""
    model, endless = make_model(Interpreting("cpu", 0, (9, 0), 8 << 30)), dataclasses.replace(SAMPLING, ignore_eos=True)
    made, texts = Engine(model, slots=12, max_length=64, window=2, cache_tokens=16 * 11), []
    prefill = made.decoder.prefill
    made.decoder.prefill = lambda given, most: (texts.extend(given), prefill(given, most))[1]
    got = made.generate(REQUESTS[:1], endless)
    assert [len(text.token_ids) for text in texts] == [44, 48]
    assert groups == [(5, True)] * 4 + [(4, True)] * 4
    assert_same(got, Engine(make_model(CPU), slots=12, max_length=64).generate(REQUESTS[:1], endless))
