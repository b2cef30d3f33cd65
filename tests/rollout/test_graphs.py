"""Captured steps: which are captured, when again, and what happens where they cannot be. Replays are stood in for."""

import dataclasses

import pytest
import torch

from experience_samples import load, tokens
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.graphs import rung_for
from ullage.rollout.sampling import GroupRequest, Sampling

SAMPLING = Sampling(max_tokens=24, temperature=0.9)


class Captures:
    """Captures as a graph does: the step runs once to warm up; a replay runs it on the tensors of its capture."""

    def __init__(self, error=None):
        self.nbytes, self.replays, self.forgotten = 0, 0, 0
        self.error = error

    def __call__(self, step):
        step()
        if self.error is not None:
            raise self.error
        self.nbytes += 1000

        def replay():
            self.replays += 1
            step()

        return replay

    def forget(self):
        self.forgotten += 1
        self.nbytes = 0


@pytest.fixture
def model(tiny_model):
    return load(tiny_model, "float32")


@pytest.fixture(scope="module")
def requests():
    generator = torch.Generator().manual_seed(2)
    return [GroupRequest(prompt=tokens(generator, n), seeds=tuple(range(n, n + 10))) for n in (4, 18, 9, 33)]


def graphed(model, lines=None, error=None):
    say = (lambda line: None) if lines is None else lines.append
    engine = Engine(model, slots=40, max_length=64, window=4, say=say)
    captures = Captures(error)
    engine.graphs._capture = captures
    return engine, captures


def plain(model, requests, sampling=SAMPLING):
    return Engine(model, slots=40, max_length=64).generate(requests, sampling)


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert dataclasses.replace(one, logprobs=()) == dataclasses.replace(other, logprobs=())
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-6)


@pytest.mark.parametrize(
    ("count", "slots", "rung"),
    [(1, 64, 16), (16, 64, 16), (17, 64, 32), (33, 64, 48), (49, 64, 64), (65, 256, 96), (513, 1024, 768)],
)
def test_rungs(count, slots, rung):
    assert rung_for(count, slots) == rung


def test_the_last_rung_is_all_slots():
    assert [rung_for(count, 200) for count in (97, 129, 193, 200)] == [128, 192, 200, 200]
    assert rung_for(5, 5) == 5


def test_replays_give_what_steps_give_and_each_size_is_captured_once(model, requests):
    engine, captures = graphed(model)
    assert_same(engine.generate(requests, SAMPLING), plain(model, requests))
    rungs = sorted(kind.rows for kind in engine.graphs._replays)
    assert rungs[-1] == 40
    assert len(rungs) > 1
    assert set(rungs) <= {16, 32, 40}
    assert captures.replays > 20
    assert engine.graphs.nbytes == 1000 * len(rungs)
    assert_same(engine.generate(requests, SAMPLING), plain(model, requests))
    assert engine.graphs.nbytes == 1000 * len(rungs), "nothing is captured twice"


def test_weights_changed_in_place_are_seen_and_nothing_is_captured_again(model, requests):
    lines = []
    engine, captures = graphed(model, lines)
    before = engine.generate(requests, SAMPLING)
    held = captures.nbytes
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.3)
    after = engine.generate(requests, SAMPLING)
    assert after != before
    assert_same(after, plain(model, requests))
    assert (lines, captures.forgotten) == ([], 0)
    assert captures.nbytes <= held + 2000, "at most sizes that the first call did not need"


def test_weights_that_moved_are_captured_again_and_said_once(model, requests):
    lines = []
    engine, captures = graphed(model, lines)
    engine.generate(requests, SAMPLING)
    weight = model.module.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    assert_same(engine.generate(requests, SAMPLING), plain(model, requests))
    assert lines == ["weights have moved in memory: the decoding graphs are captured again"]
    assert captures.forgotten == 1
    engine.generate(requests, SAMPLING)
    assert len(lines) == 1


def test_a_step_that_cannot_be_captured_runs_as_it_is(model, requests):
    lines = []
    engine, _ = graphed(model, lines, error=RuntimeError("operation not permitted when stream is capturing\nmore"))
    assert_same(engine.generate(requests, SAMPLING), plain(model, requests))
    assert lines == [
        "decoding goes on without CUDA graphs, and slower: operation not permitted when stream is capturing"
    ]
    assert not engine.graphs.enabled
    engine.generate(requests, SAMPLING)
    assert len(lines) == 1


def test_out_of_memory_while_capturing_is_for_the_replayer(model, requests):
    engine, _ = graphed(model, error=torch.OutOfMemoryError("injected"))
    with pytest.raises(torch.OutOfMemoryError):
        engine.generate(requests, SAMPLING)
    assert engine.graphs.enabled
    assert engine.pages.free == engine.pages.total


def test_truncating_steps_are_captured_apart(model, requests):
    engine, _ = graphed(model)
    for sampling in (SAMPLING, Sampling(max_tokens=24, temperature=0.0), Sampling(max_tokens=24, top_k=4)):
        assert_same(engine.generate(requests, sampling), plain(model, requests, sampling))
    assert {kind.truncates for kind in engine.graphs._replays} == {False, True}
    assert not any(kind.shares for kind in engine.graphs._replays)
