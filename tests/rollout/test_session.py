"""Sessions: requests that come and go between windows, each with its own way of sampling."""

import dataclasses

import pytest
import torch

from experience_samples import load, tokens
from ullage.base.errors import DoesNotFitError, NumericsError
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.session import Drawn
from ullage.rollout.sampling import GroupRequest, Sampling

LENGTHS = (5, 17, 16)


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model, "float32")


@pytest.fixture(scope="module")
def requests():
    generator = torch.Generator().manual_seed(9)
    return [GroupRequest(prompt=tokens(generator, n), seeds=(n, n + 1, n + 2)) for n in LENGTHS]


def make_engine(model, **given):
    return Engine(model, **{"slots": 8, "max_length": 64, **given})


def collect(session, seen):
    """Advance until idle; tokens, log-probs and reasons by key and index."""
    while not session.idle:
        note(session.advance(), seen)
    return seen


def note(drawn, seen):
    for piece in drawn:
        assert isinstance(piece, Drawn)
        assert len(piece.token_ids) == len(piece.logprobs) > 0
        ids, logprobs, reason = seen.get((piece.key, piece.index), ((), (), None))
        assert reason is None, "nothing comes after the end"
        ids, logprobs = ids + tuple(piece.token_ids), logprobs + tuple(piece.logprobs)
        seen[piece.key, piece.index] = ids, logprobs, piece.finish_reason


SAMPLINGS = (
    Sampling(max_tokens=20, temperature=0.7),
    Sampling(max_tokens=12, temperature=0.0),
    Sampling(max_tokens=25, top_p=0.6, top_k=9, ignore_eos=True),
)


def alone(model, request, sampling):
    samples = make_engine(model).generate([request], sampling)
    return [(sample.token_ids, sample.logprobs, sample.finish_reason) for sample in samples]


@pytest.mark.invariant
@pytest.mark.parametrize("window", [1, 6])
def test_each_request_is_sampled_its_own_way(model, requests, window):
    session = make_engine(model, window=window).session()
    for key, request, sampling in zip("abc", requests, SAMPLINGS, strict=True):
        session.submit(key, request, sampling)
    seen = collect(session, {})
    for key, request, sampling in zip("abc", requests, SAMPLINGS, strict=True):
        for index, (ids, logprobs, reason) in enumerate(alone(model, request, sampling)):
            assert seen[key, index][0] == ids
            assert seen[key, index][1] == pytest.approx(logprobs, rel=0, abs=1e-6)
            assert seen[key, index][2] == reason
    session.close()


@pytest.mark.invariant
@pytest.mark.parametrize("window", [1, 4])
def test_requests_join_while_others_run(model, requests, window):
    session, seen = make_engine(model, slots=4, window=window).session(), {}
    for key, request, sampling in zip("abc", requests, SAMPLINGS, strict=True):
        session.submit(key, request, sampling)
        note(session.advance(), seen)
    collect(session, seen)
    for key, request, sampling in zip("abc", requests, SAMPLINGS, strict=True):
        assert [seen[key, index][0] for index in range(3)] == [ids for ids, _, _ in alone(model, request, sampling)]
    assert session.idle
    assert session.advance() == []
    session.submit("a", requests[0], SAMPLINGS[0])
    again = collect(session, {})
    assert {place: again[place] for place in again} == {place: seen[place] for place in again}


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_cancelled_request_gives_everything_back(model, requests, window, after):
    engine = make_engine(model, window=window)
    session = engine.session()
    forever = Sampling(max_tokens=30, ignore_eos=True)
    session.submit("kept", requests[0], forever)
    session.submit("cancelled", requests[1], forever)
    seen = {}
    for _ in range(after):
        note(session.advance(), seen)
    session.cancel("cancelled")
    session.cancel("never there")
    rest = {}
    while not session.idle:
        drawn = session.advance()
        assert {piece.key for piece in drawn} <= {"kept"}
        note(drawn, seen)
        note([piece for piece in drawn if piece.key != "kept"], rest)
    assert rest == {}
    assert [seen["kept", i][0] for i in range(3)] == [ids for ids, _, _ in alone(model, requests[0], forever)]
    assert engine.pages.free == engine.pages.total


def test_a_cancelled_key_can_be_used_again_at_once(model, requests):
    """Tokens of the first request that are still on their way are not the second's."""
    session = make_engine(model, window=4).session()
    session.submit("key", requests[0], SAMPLINGS[2])
    session.advance()
    session.cancel("key")
    session.submit("key", requests[1], SAMPLINGS[1])
    seen = collect(session, {})
    assert [seen["key", i][0] for i in range(3)] == [ids for ids, _, _ in alone(model, requests[1], SAMPLINGS[1])]


def test_closing_half_way_returns_the_pages(model, requests):
    engine = make_engine(model, slots=4, window=3)
    session = engine.session()
    for key, request in enumerate(requests):
        session.submit(key, request, SAMPLINGS[2])
    session.advance()
    session.advance()
    assert engine.pages.free < engine.pages.total
    session.close()
    assert engine.pages.free == engine.pages.total
    assert session.idle


def test_what_can_never_fit_is_refused_when_it_is_asked_for(model, requests):
    session = make_engine(model, cache_tokens=48).session()
    with pytest.raises(DoesNotFitError, match="the KV cache of 48 tokens cannot hold one sequence"):
        session.submit("long", requests[1], Sampling(max_tokens=32))
    roomy = make_engine(model).session()
    with pytest.raises(DoesNotFitError, match="a sequence of 117 tokens is longer than the 80"):
        roomy.submit("long", requests[1], Sampling(max_tokens=100))
    assert session.idle


def test_non_finite_logits_are_said_before_any_token_is_handed_out(tiny_model, requests):
    broken = load(tiny_model, "float32")
    broken.module.model.norm.weight.data[0] = float("nan")
    engine = make_engine(broken, window=4)
    session = engine.session()
    session.submit(0, requests[0], SAMPLINGS[0])
    with pytest.raises(NumericsError, match="non-finite logits"):
        collect(session, {})
    session.close()
    assert engine.pages.free == engine.pages.total


def test_supports_come_with_their_tokens_also_beside_others(model, requests):
    keeping = dataclasses.replace(SAMPLINGS[2], keep_supports=True, top_p=0.9)
    [want, *_] = make_engine(model).generate(requests[2:], keeping)
    session = make_engine(model, window=6).session()
    session.submit("plain", requests[0], SAMPLINGS[0])
    session.submit("kept", requests[2], keeping)
    supports = []
    while not session.idle:
        for piece in session.advance():
            if (piece.key, piece.index) == ("kept", 0):
                supports += piece.supports
            elif piece.key == "plain":
                assert not piece.supports
    assert [ids.tolist() for ids in supports] == [ids.tolist() for ids in want.supports]
    assert max(map(len, supports)) <= 9
