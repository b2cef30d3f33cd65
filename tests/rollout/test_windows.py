"""Windows of steps, growth page by page, and samples that make room for others: none of it changes a token."""

import dataclasses
import gc

import pytest
import torch

from experience_samples import load, tokens
from ullage.planner.drawing import cache_tokens
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.layouts import PrefillLayout
from ullage.rollout.sampling import GroupRequest, Sampling

MAX_TOKENS = 40
PROMPT_LENGTHS = (3, 16, 21)
SAMPLING = Sampling(max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model, "float32")


@pytest.fixture(scope="module")
def requests():
    generator = torch.Generator().manual_seed(5)
    return [
        GroupRequest(prompt=tokens(generator, length), seeds=tuple(10 * length + i for i in range(4)))
        for length in PROMPT_LENGTHS
    ]


@pytest.fixture(scope="module")
def expected(model, requests):
    return make_engine(model).generate(requests, SAMPLING)


def make_engine(model, **given):
    return Engine(model, **{"slots": 12, "max_length": max(PROMPT_LENGTHS) + MAX_TOKENS, **given})


class Watched:
    """A model that notes the rows of its decoding passes and the lengths of what it prefills."""

    def __init__(self, model):
        self.model, self.decoded, self.prefilled = model, [], []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def hidden(self, input_ids, positions, layout):
        if isinstance(layout, PrefillLayout):
            self.prefilled += [span.prompt for span in layout.spans]
        else:
            self.decoded.append(input_ids.shape[1])
        return self.model.hidden(input_ids, positions, layout)


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert dataclasses.replace(one, logprobs=()) == dataclasses.replace(other, logprobs=())
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-6)


@pytest.mark.invariant
@pytest.mark.parametrize(("window", "slots"), [(2, 12), (7, 12), (16, 12), (64, 12), (5, 1), (16, 5)])
def test_the_length_of_a_window_changes_nothing(model, requests, expected, window, slots):
    engine = make_engine(model, window=window, slots=slots)
    assert_same(engine.generate(requests, SAMPLING), expected)
    assert engine.pages.free == engine.pages.total
    assert {sample.finish_reason for sample in expected} == {"stop", "length"}


@pytest.mark.invariant
@pytest.mark.parametrize(("window", "pages"), [(1, 5), (1, 13), (4, 6), (4, 9), (16, 8), (16, 13)])
def test_samples_that_made_room_go_on_where_they_were(model, requests, window, pages):
    endless = dataclasses.replace(SAMPLING, ignore_eos=True)
    watched = Watched(model)
    engine = make_engine(watched, window=window, cache_tokens=16 * pages)
    assert_same(engine.generate(requests, endless), make_engine(model).generate(requests, endless))
    assert engine.pages.free == engine.pages.total
    again = [length for length in watched.prefilled if length not in (*PROMPT_LENGTHS, 1)]
    assert again, "some were prefilled with what they had drawn"


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize(("prompt", "response"), [(15, 40), (16, 40), (21, 40), (48, 40), (31, 10), (31, 16), (21, 16)])
def test_the_room_that_is_planned_for_all_samples_makes_none_wait(model, prompt, response, window):
    generator = torch.Generator().manual_seed(5)
    requests = [GroupRequest(prompt=tokens(generator, prompt), seeds=(1, 2, 3, 4)) for _ in range(3)]
    endless = Sampling(max_tokens=response, ignore_eos=True)
    watched, room = Watched(model), cache_tokens(slots=12, samples=12, n=4, prompt=prompt, response=response)
    engine = make_engine(watched, slots=12, max_length=prompt + response, window=window, cache_tokens=room)
    engine.generate(requests, endless)
    assert watched.prefilled == [prompt] * 3
    assert len(watched.decoded) == response - 1, "the first token needs no step, and nobody comes later"


def test_pages_are_granted_as_samples_grow(model, requests):
    """Twelve samples, one window of 4: their prompts, and the page that the next tokens need."""
    engine = make_engine(model, window=4)
    session = engine.session()
    for key, request in enumerate(requests):
        session.submit(key, request, dataclasses.replace(SAMPLING, ignore_eos=True))
    session.advance()
    # 3 + 4 tokens: a page each; 16 + 4: one shared, one each; 21 + 4: one shared, one each.
    assert engine.pages.total - engine.pages.free == 4 + (1 + 4) + (1 + 4)
    for _ in range(3):
        session.advance()
    # 16 more at the most: 19 + 4, 32 + 4 and 37 + 4 tokens after the next window.
    session.advance()
    assert engine.pages.total - engine.pages.free == 4 * 2 + (1 + 4 * 2) + (1 + 4 * 2)
    session.close()
    assert engine.pages.free == engine.pages.total


@pytest.mark.parametrize("window", [1, 8])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_poisoned_memory_never_reaches_a_result(tiny_architecture, requests, architecture, window):
    poisoned = make_engine(load(tiny_architecture(architecture), "float32"), slots=5, window=window)
    want = poisoned.generate(requests, SAMPLING)
    poisoned.pages.arena.fill_(float("nan"))
    assert poisoned.generate(requests, SAMPLING) == want


def test_a_lent_cache_is_used_as_it_is(model, requests, expected):
    lent = torch.full((2 << 20,), float("nan"))
    engine = make_engine(model, lent=lent)
    assert engine.is_lent
    assert engine.nbytes == 0
    assert_same(engine.generate(requests, SAMPLING), expected)
    lent.fill_(float("inf"))
    assert_same(engine.generate(requests, SAMPLING), expected)


def test_many_calls_leave_nothing_behind(model, requests):
    engine = make_engine(model, slots=3, window=4, cache_tokens=80)
    requests, short = requests[2:], dataclasses.replace(SAMPLING, max_tokens=6)

    def living():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    first = engine.generate(requests, short)
    before = living()
    for _ in range(50):
        assert engine.generate(requests, short) == first
    del first
    assert living() <= before
    assert engine.pages.free == engine.pages.total


@pytest.mark.parametrize("window", [1, 16])
def test_no_step_is_run_for_samples_that_have_ended(model, requests, window):
    watched = Watched(model)
    make_engine(watched, window=window).generate(requests, dataclasses.replace(SAMPLING, max_tokens=5, ignore_eos=True))
    assert watched.decoded == [16] * 4, "the first token needs no step, and the host knows when all have the last"
    watched.decoded.clear()
    make_engine(watched, window=window).generate(requests, dataclasses.replace(SAMPLING, max_tokens=1))
    assert watched.decoded == []
