"""The engine with captured graphs on a CUDA device. Run: make gpu."""

import dataclasses

import pytest
import torch

from ullage.model.load import load_model
from ullage.model.target import find_target
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SAMPLING = Sampling(max_tokens=70, ignore_eos=True)
REQUESTS = [GroupRequest(prompt=tuple(range(5, 5 + n)), seeds=tuple(range(n, n + 6))) for n in (3, 16, 17, 24, 31)]


def make_model(folder, dtype="bfloat16"):
    return load_model(str(folder), find_target("cuda", 0), dtype=dtype)


def make_engine(model, **given):
    lines = given.pop("lines", None)
    say = (lambda line: None) if lines is None else lines.append
    return Engine(model, **{"slots": 30, "max_length": 101, "say": say, **given})


def eager(model, **given):
    engine = make_engine(model, **given)
    engine.graphs._capture = None
    return engine


def without_logprobs(samples):
    return [dataclasses.replace(sample, logprobs=()) for sample in samples]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"])
def test_graphs_are_captured_and_agree_with_plain_steps(tiny_architecture, architecture):
    lines = []
    model = make_model(tiny_architecture(architecture))
    engine = make_engine(model, lines=lines, deterministic=True)
    got = engine.generate(REQUESTS, SAMPLING)
    assert lines == []
    assert len(engine.graphs._replays) == 1
    assert got == eager(model, deterministic=True).generate(REQUESTS, SAMPLING)
    assert engine.pages.free == engine.pages.total


@pytest.mark.parametrize("sampling", [SAMPLING, dataclasses.replace(SAMPLING, temperature=0.7, top_p=0.9, top_k=20)])
def test_float32_samples_do_not_hang_on_windows_slots_or_preemption(tiny_model, sampling):
    """Without kernels of our own, but with graphs; rounding may differ in the last digits and so, rarely, a token."""
    model = make_model(tiny_model, "float32")
    want = make_engine(model).generate(REQUESTS, sampling)
    for given in ({"window": 1}, {"slots": 7}, {"cache_tokens": 320, "window": 4}):
        got = make_engine(model, **given).generate(REQUESTS, sampling)
        differing = sum(a != b for a, b in zip(without_logprobs(got), without_logprobs(want), strict=True))
        assert differing <= 2, given


@pytest.mark.parametrize("slots", [30, 7])
def test_the_deterministic_mode_is_exact_in_bfloat16(tiny_model, slots):
    """All alone, and in other company, with the same rows in every pass."""
    model = make_model(tiny_model)
    engine = make_engine(model, slots=slots, deterministic=True)
    together = engine.generate(REQUESTS, SAMPLING)
    for number, request in enumerate(REQUESTS):
        alone = engine.generate([request], SAMPLING)
        assert [dataclasses.replace(sample, group=number) for sample in alone] == together[6 * number : 6 * number + 6]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_beginnings_that_samples_share_are_read_once(tiny_architecture, architecture):
    """With graphs as without, all rows in every step; beside samples that read for themselves and round differently."""
    lines, model = [], make_model(tiny_architecture(architecture))
    requests = [
        GroupRequest(prompt=tuple(5 + (7 * i) % 23 for i in range(n)), seeds=tuple(range(n, n + 6)))
        for n in (128, 130, 144, 161, 190)
    ]
    given = {"max_length": 270, "lines": lines}
    engine = make_engine(model, **given)
    got = engine.generate(requests, SAMPLING)
    assert lines == []
    assert list(engine.graphs._replays) == [(30, False, True)]
    assert got == eager(model, **given).generate(requests, SAMPLING)
    apart = make_engine(model, **given, share_prefix=False)
    want = apart.generate(requests, SAMPLING)
    assert list(apart.graphs._replays) == [(30, False, False)]
    gaps = []
    for one, other in zip(got, want, strict=True):
        alike = next((i for i in range(70) if one.token_ids[i] != other.token_ids[i]), 70)
        gaps += [abs(a - b) for a, b in zip(one.logprobs[:alike], other.logprobs[:alike], strict=True)]
    assert len(gaps) > 30 * 70 // 2, "most tokens are the same"
    assert sum(gaps) / len(gaps) < 0.02, "bfloat16 has 8 bits"


def test_updates_in_place_are_seen_and_moved_weights_captured_again(tiny_model):
    lines = []
    model = make_model(tiny_model)
    engine = make_engine(model, lines=lines, deterministic=True)
    before = engine.generate(REQUESTS, SAMPLING)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.5)
    after = engine.generate(REQUESTS, SAMPLING)
    assert without_logprobs(after) != without_logprobs(before)
    assert after == eager(model, deterministic=True).generate(REQUESTS, SAMPLING)
    assert lines == []
    weight = model.module.model.layers[0].mlp.up_proj.weight
    kept = weight.data
    weight.data = weight.data.clone()
    kept.fill_(float("nan"))
    assert engine.generate(REQUESTS, SAMPLING) == after
    assert lines == ["weights have moved in memory: the decoding graphs are captured again"]


def test_poisoned_memory_and_many_calls(tiny_model):
    model = make_model(tiny_model)
    engine = make_engine(model, deterministic=True)
    want = engine.generate(REQUESTS, SAMPLING)
    engine.pages.arena.fill_(float("nan"))
    assert engine.generate(REQUESTS, SAMPLING) == want
    allocated, held = torch.cuda.memory_allocated(), engine.graphs.nbytes
    for _ in range(50):
        engine.generate(REQUESTS[:2], dataclasses.replace(SAMPLING, max_tokens=20))
    assert torch.cuda.memory_allocated() <= allocated
    assert engine.graphs.nbytes == held
    assert engine.pages.free == engine.pages.total
