"""The worker and the answers it gives: cancelled work gives everything back, and one failure is not the last word."""

import queue

import pytest

from experience_samples import load
from ullage.base.errors import NumericsError
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.session import Session
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.serve.answer import Answer, Order
from ullage.serve.worker import StoppingError, Worker

PROMPT = (5, 6, 7, 8)
LONG = Sampling(max_tokens=480, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model, "float32")


@pytest.fixture
def engine(model):
    return Engine(model, slots=4, max_length=500)


@pytest.fixture
def worker(engine):
    made = Worker(engine)
    yield made
    made.close()
    assert engine.pages.free == engine.pages.total


def order(**changes):
    return Order(**{"prompts": (PROMPT,), "sampling": Sampling(max_tokens=20), "seed": 1, **changes})


def pieces_of(answer, inbox):
    pieces = []
    while not answer.finished:
        piece = answer.take(inbox.get(timeout=20))
        if piece is not None:
            pieces.append(piece)
    return pieces


def ask(worker, model, wanted):
    inbox = queue.SimpleQueue()
    return pieces_of(Answer(wanted, worker, model.tokenizer, inbox.put), inbox)


def tokens_of(pieces, choice=0):
    return [token for piece in pieces if piece.choice == choice for token in piece.token_ids]


def until(worker, condition):
    while not condition(status := worker.status):
        assert worker.failure is None
    return status


def test_answers_are_those_of_the_engine(worker, model):
    wanted = order(prompts=(PROMPT, PROMPT[:2]), samples=3)
    pieces = ask(worker, model, wanted)
    from ullage.base.seeds import derive

    seeds = tuple(derive(1, "serve", sample) for sample in range(3))
    requests = [GroupRequest(prompt=prompt, seeds=seeds) for prompt in wanted.prompts]
    samples = Engine(model, slots=8, max_length=40).generate(requests, wanted.sampling)
    for choice, sample in enumerate(samples):
        assert tuple(tokens_of(pieces, choice)) == sample.token_ids
        last = [piece for piece in pieces if piece.choice == choice][-1]
        assert last.finish_reason == sample.finish_reason


def test_cancelled_work_gives_back_slots_and_pages_and_others_go_on(worker, model, engine):
    inbox = queue.SimpleQueue()
    leaving = Answer(order(sampling=LONG, samples=6), worker, model.tokenizer, inbox.put)
    leaving.take(inbox.get(timeout=20))
    assert until(worker, lambda status: status.running == 4).waiting == 2
    staying = queue.SimpleQueue()
    patient = Answer(order(), worker, model.tokenizer, staying.put)
    leaving.cancel()
    assert tokens_of(pieces_of(patient, staying)) == tokens_of(ask(worker, model, order()))
    status = until(worker, lambda status: status.running + status.waiting == 0)
    assert status.free_pages == status.total_pages
    assert status.drawn_tokens < 6 * 480
    leaving.cancel()


def test_a_stop_string_frees_the_slot_of_its_sample_alone(worker, model):
    free = ask(worker, model, order(samples=2))
    texts = ["".join(piece.text for piece in free if piece.choice == choice) for choice in (0, 1)]
    stop = next(texts[0][at : at + 2] for at in range(len(texts[0]) - 2) if texts[0][at : at + 2] not in texts[1])
    before = worker.status.drawn_tokens
    pieces = ask(worker, model, order(samples=2, stops=(stop,), sampling=Sampling(max_tokens=20)))
    assert "".join(piece.text for piece in pieces if piece.choice == 0) == texts[0].partition(stop)[0]
    assert tokens_of(pieces, 1) == tokens_of(free, 1)
    until(worker, lambda status: status.running == 0)
    drawn = worker.status.drawn_tokens - before
    assert (
        len(tokens_of(pieces, 0)) + len(tokens_of(pieces, 1))
        <= drawn
        < len(tokens_of(free, 0)) + len(tokens_of(free, 1)) + 2
    ), "at most the window under way was drawn in vain"


def test_what_is_asked_counts_at_once(worker, model):
    answers = [Answer(order(sampling=LONG, samples=5), worker, model.tokenizer, lambda item: None) for _ in range(3)]
    status = worker.status
    assert status.running + status.waiting == 15
    for answer in answers:
        answer.cancel()
    until(worker, lambda status: status.running + status.waiting == 0)


def test_an_error_ends_the_answers_under_way_and_no_other(worker, model, monkeypatch):
    expected = tokens_of(ask(worker, model, order()))

    def fail(session):
        monkeypatch.undo()
        raise NumericsError("the model gives non-finite logits", "check the weights")

    monkeypatch.setattr(Session, "advance", fail)
    with pytest.raises(NumericsError, match="non-finite"):
        ask(worker, model, order())
    assert tokens_of(ask(worker, model, order())) == expected
    assert worker.status.running + worker.status.waiting == 0


def test_an_engine_that_is_broken_for_good_says_so(model, monkeypatch):
    def fail(session):
        raise RuntimeError("device lost")

    monkeypatch.setattr(Session, "advance", fail)
    monkeypatch.setattr(Session, "close", fail)
    worker = Worker(Engine(model, slots=4, max_length=100))
    heard = queue.SimpleQueue()
    worker.on_failure = lambda: heard.put("failure")
    with pytest.raises(RuntimeError, match="device lost"):
        ask(worker, model, order())
    assert heard.get(timeout=20) == "failure"
    assert str(worker.failure) == "device lost"
    with pytest.raises(StoppingError):
        ask(worker, model, order())
    worker.close()


def test_closing_ends_what_runs_and_what_waits(model, engine):
    worker = Worker(engine)
    inboxes = [queue.SimpleQueue() for _ in range(3)]
    answers = [Answer(order(sampling=LONG, samples=3), worker, model.tokenizer, inbox.put) for inbox in inboxes]
    worker.close()
    for answer, inbox in zip(answers, inboxes, strict=True):
        with pytest.raises(StoppingError):
            pieces_of(answer, inbox)
    assert engine.pages.free == engine.pages.total
    status = worker.status
    assert (status.running, status.waiting) == (0, 0)
    with pytest.raises(StoppingError):
        ask(worker, model, order())


def test_seeds_belong_to_choices_not_to_company(worker, model):
    together = ask(worker, model, order(samples=4, prompts=(PROMPT, PROMPT[1:])))
    alone = ask(worker, model, order(prompts=(PROMPT[1:],)))
    assert tokens_of(together, 4) == tokens_of(alone)
    assert len({tuple(tokens_of(together, choice)) for choice in range(4)}) == 4
