"""The embedded engine: the same completions whatever the slots, order or cache; pages returned; ends and reasons."""

import dataclasses
from typing import NamedTuple

import pytest
import torch

from experience_samples import load, rollouts_of, tokens
from ullage.base.errors import DoesNotFitError, NumericsError
from ullage.batch.pack import Limits
from ullage.model.head import MIN_ROWS
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.pages import PAGE_SIZE
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.trainer.collect import to_rollouts
from ullage.workers.passes import stage_logprobs

EOS = 2
MAX_TOKENS = 18
PROMPT_LENGTHS = (1, 15, 16, 17, 32, 7)
"""Around page boundaries: a page holds 16 tokens."""


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model, "float32")


@pytest.fixture(scope="module")
def requests():
    generator = torch.Generator().manual_seed(3)
    return [
        GroupRequest(prompt=tokens(generator, length), seeds=tuple(100 * length + i for i in range(5)))
        for length in PROMPT_LENGTHS
    ]


def make_engine(model, slots=64, cache_tokens=None):
    return Engine(model, slots=slots, max_length=max(PROMPT_LENGTHS) + MAX_TOKENS, cache_tokens=cache_tokens)


class Prompted(NamedTuple):
    """A prompt as a stage wants it."""

    token_ids: tuple[int, ...]


def assert_same(got, want):
    """The same completions; log-probs to the last digits, since not every CPU rounds a row alike in all company."""
    for one, other in zip(got, want, strict=True):
        assert dataclasses.replace(one, logprobs=()) == dataclasses.replace(other, logprobs=())
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-6)


def sampling(**changes):
    return Sampling(**{"max_tokens": MAX_TOKENS, **changes})


@pytest.fixture(scope="module")
def expected(model, requests):
    return make_engine(model).generate(requests, sampling())


def test_samples_are_ordered_and_of_varied_length(expected):
    assert [(sample.group, sample.index) for sample in expected] == [(g, i) for g in range(6) for i in range(5)]
    longer = [sample.token_ids for sample in expected if len(sample.token_ids) > 1]
    assert len(set(longer)) == len(longer) >= 25
    assert {sample.finish_reason for sample in expected} == {"stop", "length"}


@pytest.mark.invariant
@pytest.mark.parametrize("slots", [1, 3, 7, 64])
def test_slots_change_nothing(model, requests, expected, slots):
    engine = make_engine(model, slots=slots)
    assert_same(engine.generate(requests, sampling()), expected)
    assert engine.pages.free == engine.pages.total


@pytest.mark.invariant
def test_order_of_requests_changes_nothing(model, requests, expected):
    order = [3, 0, 5, 1, 4, 2]
    got = make_engine(model, slots=4).generate([requests[group] for group in order], sampling())
    place = {(order[sample.group], sample.index): sample for sample in got}
    for sample in expected:
        assert_same([dataclasses.replace(place[sample.group, sample.index], group=sample.group)], [sample])


@pytest.mark.invariant
@pytest.mark.parametrize("cache_tokens", [112, 176, 304])
def test_a_tight_cache_makes_samples_wait_and_changes_nothing(model, requests, expected, cache_tokens):
    engine = make_engine(model, slots=64, cache_tokens=cache_tokens)
    most = 0

    def watch(tokens, done):
        nonlocal most
        most = max(most, engine.pages.total - engine.pages.free)

    assert_same(engine.generate(requests, sampling(), on_progress=watch), expected)
    # A page for everybody's next window is kept free when another comes in.
    assert cache_tokens // PAGE_SIZE - 6 <= most <= cache_tokens // PAGE_SIZE, "the cache was the limit"
    assert engine.pages.free == engine.pages.total


@pytest.mark.invariant
def test_a_second_call_finds_a_clean_engine(model, requests, expected):
    engine = make_engine(model, slots=5)
    engine.generate(requests[::-1], sampling(max_tokens=9))
    assert_same(engine.generate(requests, sampling()), expected)


@pytest.mark.invariant
@pytest.mark.parametrize(("share_prefix", "max_tokens"), [(True, 4096), (False, 4096), (True, 64)])
def test_logprobs_equal_the_trainers_in_float32(model, requests, expected, share_prefix, max_tokens):
    stage = rollouts_of([request.prompt for request in requests], expected)
    valid = torch.ones(len(expected), dtype=torch.bool)
    experience = stage.scored(rewards_N=torch.zeros(len(expected)), valid_N=valid)
    limits = Limits(max_tokens=max_tokens, share_prefix=share_prefix)
    trainer = stage_logprobs(experience, [torch.arange(len(expected))], model, limits, 1.0)
    assert (trainer - stage.rollout_logprobs_NT).abs().max() <= 1e-5


@pytest.mark.invariant
@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.8}, {"top_k": 12, "top_p": 0.9}])
def test_truncated_logprobs_are_replayed_by_the_trainer(model, requests, truncation):
    samples = make_engine(model, slots=7).generate(requests, sampling(keep_supports=True, **truncation))
    stage = to_rollouts([Prompted(request.prompt) for request in requests], range(len(requests)), samples)
    sizes = {len(ids) for support in stage.supports for ids in support}
    assert max(sizes) <= truncation.get("top_k", model.head.weight.shape[0] - 1)
    valid = torch.ones(len(samples), dtype=torch.bool)
    experience = stage.scored(rewards_N=torch.zeros(len(samples)), valid_N=valid)
    limits = Limits(max_tokens=200)
    trainer = stage_logprobs(experience, [torch.arange(len(samples))], model, limits, 1.0)
    assert (trainer - stage.rollout_logprobs_NT).abs().max() <= 1e-5
    whole = dataclasses.replace(experience, supports=None)
    untruncated = stage_logprobs(whole, [torch.arange(len(samples))], model, limits, 1.0)
    assert (untruncated - stage.rollout_logprobs_NT)[stage.mask_NT].min() < -0.1, "truncation matters here"


def test_supports_are_only_given_where_they_are_asked_for(model, requests):
    samples = make_engine(model).generate(requests[:1], sampling(top_k=3))
    assert {sample.supports for sample in samples} == {None}


def test_a_cache_too_small_for_one_sequence_is_refused(model, requests):
    engine = make_engine(model, cache_tokens=32)
    with pytest.raises(DoesNotFitError, match="the KV cache of 32 tokens cannot hold one sequence"):
        engine.generate(requests[4:5], sampling())
    assert engine.pages.free == engine.pages.total


def test_each_prompt_is_forwarded_once_per_group(model, requests, expected):
    fed = []

    class Counting:
        def __getattr__(self, name):
            return getattr(model, name)

        def hidden(self, input_ids, positions, layout):
            fed.append(input_ids[0].tolist())
            return model.hidden(input_ids, positions, layout)

    make_engine(Counting(), slots=64).generate(requests, sampling())
    assert fed[0] == [token for request in requests for token in request.prompt]
    decoded = sum(len(sample.token_ids) - 1 for sample in expected)
    assert sum(map(len, fed[1:])) >= decoded
    # Passes of fewer rows are filled up.
    assert sum(len(row) for row in fed[1:] if len(row) > MIN_ROWS) <= decoded

    fed.clear()
    make_engine(Counting(), slots=2).generate(requests[3:4], sampling())
    assert [len(row) for row in fed].count(17) == 1, "a group larger than the slots keeps its prompt in the cache"


def test_finish_reasons_and_end_tokens(expected):
    for sample in expected:
        if sample.finish_reason == "stop":
            assert sample.token_ids[-1] == EOS
            assert EOS not in sample.token_ids[:-1]
        else:
            assert len(sample.token_ids) == MAX_TOKENS
            assert EOS not in sample.token_ids
        assert len(sample.logprobs) == len(sample.token_ids)


def test_every_end_token_ends_a_sample(model, requests, expected):
    stops = frozenset({EOS, 10, 20})
    got = make_engine(dataclasses.replace(model, stop_ids=stops)).generate(requests, sampling())
    assert {sample.token_ids[-1] for sample in got if sample.finish_reason == "stop"} == stops
    for short, long in zip(got, expected, strict=True):
        end = next((i + 1 for i, token in enumerate(long.token_ids) if token in stops), MAX_TOKENS)
        assert short.token_ids == long.token_ids[:end]


def test_ignore_eos_runs_to_full_length(model, requests, expected):
    got = make_engine(model).generate(requests, sampling(ignore_eos=True))
    assert {(len(sample.token_ids), sample.finish_reason) for sample in got} == {(MAX_TOKENS, "length")}
    for long, short in zip(got, expected, strict=True):
        assert long.token_ids[: len(short.token_ids)] == short.token_ids


def test_on_finish_sees_each_sample_once_as_it_ends(model, requests, expected):
    seen = []
    done = []
    make_engine(model, slots=4).generate(
        requests, sampling(), on_finish=seen.append, on_progress=lambda tokens, finished: done.append(finished)
    )
    assert_same(sorted(seen, key=lambda sample: (sample.group, sample.index)), expected)
    assert done[-1] == 30
    assert done[0] < 4, "not all at the end"


def test_progress_counts_tokens(model, requests, expected):
    counts = []
    make_engine(model, slots=4).generate(requests, sampling(), on_progress=lambda tokens, _: counts.append(tokens))
    assert counts[-1] == sum(len(sample.token_ids) for sample in expected)
    assert counts == sorted(counts)


class _StopError(Exception):
    pass


@pytest.mark.parametrize("after", [1, 4, 9])
@pytest.mark.parametrize("where", ["on_progress", "on_finish"])
def test_pages_are_returned_after_an_exception(model, requests, expected, where, after):
    engine = make_engine(model, slots=4, cache_tokens=400)
    calls = 0

    def stop(*_):
        nonlocal calls
        calls += 1
        if calls == after:
            raise _StopError

    with pytest.raises(_StopError):
        engine.generate(requests, sampling(), **{where: stop})
    assert engine.pages.free == engine.pages.total
    assert_same(engine.generate(requests, sampling()), expected)


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}], ids=["greedy", "sampled", "top-p", "top-k"]
)
def test_non_finite_weights_are_a_numerics_error_and_return_the_pages(tiny_model, requests, how):
    broken = load(tiny_model, "float32")
    engine = make_engine(broken, slots=4)
    calls = 0

    def poison(*_):
        nonlocal calls
        calls += 1
        if calls == 3:
            broken.module.model.norm.weight.data[0] = float("nan")

    with pytest.raises(NumericsError, match="non-finite logits"):
        engine.generate(requests, sampling(**how), on_progress=poison)
    assert engine.pages.free == engine.pages.total


def test_no_requests(model):
    assert make_engine(model).generate([], sampling()) == []


def test_weights_are_read_not_copied(tiny_model, requests):
    changed = load(tiny_model, "float32")
    engine = make_engine(changed)
    before = engine.generate(requests[:1], sampling())
    with torch.no_grad():
        for parameter in changed.module.parameters():
            parameter.mul_(1.5)
    after = engine.generate(requests[:1], sampling())
    assert before != after
    assert after == make_engine(changed).generate(requests[:1], sampling())


def test_long_prompts_are_prefilled_in_several_passes(model, requests, expected, monkeypatch):
    monkeypatch.setattr("ullage.rollout.embedded.engine.PREFILL_TOKENS", 20)
    assert_same(make_engine(model).generate(requests, sampling()), expected)


def test_a_second_call_goes_on_where_the_first_one_failed(model, requests, expected):
    """With other limits, too; what had ended is not drawn again."""
    engine, finished, seen = make_engine(model), {}, []

    def fail(tokens, done):
        if done > 4:
            raise torch.OutOfMemoryError("injected")

    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(requests, sampling(), finished=finished, on_finish=seen.append, on_progress=fail)
    assert 4 < len(finished) < len(expected)
    smaller, kept = Limits(max_tokens=20, max_sequences=3), list(seen)
    got = engine.generate(requests, sampling(), limits=smaller, finished=finished, on_finish=seen.append)
    assert_same(got, expected)
    assert len(seen) == len(expected)
    assert all(any(sample is one for one in got) for sample in kept), "not drawn again"
    assert engine.pages.free == engine.pages.total
