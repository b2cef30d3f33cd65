"""What samples begin with in common: who shares it, and that their pages are theirs in every window that reads them."""

import dataclasses
import random

import pytest
import torch
from transformers import AutoConfig

from experience_samples import load, tokens
from ullage.model.random_weights import random_model
from ullage.rollout.embedded import requests as known
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.graphs import Kind
from ullage.rollout.embedded.pages import PAGE_SIZE
from ullage.rollout.embedded.requests import Group, Run, shared_beginnings
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.run.trace_phases import traced_target

SAMPLING = Sampling(max_tokens=30)


def runs_of(prompt, first_pages):
    group = Group("key", tuple(range(prompt)), SAMPLING, 30)
    return [Run(group, i, i, pages=[page, 99]) for i, page in enumerate(first_pages)]


def test_four_that_begin_with_the_same_page_share_the_whole_pages_of_their_prompt():
    rows = [*runs_of(150, [7, 7]), *runs_of(128, [3] * 3), *runs_of(150, [7, 7, 8])]
    starts, groups = shared_beginnings(rows)
    assert starts == [144, 144, 0, 0, 0, 144, 144, 0]
    assert groups == [[0, 1, 5, 6]]


@pytest.mark.parametrize(("prompt", "start"), [(127, 0), (128, 128), (143, 128), (5, 0)])
def test_a_short_beginning_is_not_worth_it(prompt, start):
    starts, groups = shared_beginnings(runs_of(prompt, [4] * 4))
    assert starts == [start] * 4
    assert groups == ([[0, 1, 2, 3]] if start else [])


@pytest.mark.parametrize(("count", "sizes"), [(16, [16]), (17, [9, 8]), (33, [11, 11, 11]), (50, [13, 13, 12, 12])])
def test_many_are_divided_evenly(count, sizes):
    starts, groups = shared_beginnings(runs_of(128, [4] * count))
    assert starts == [128] * count
    assert [len(rows) for rows in groups] == sizes
    assert sorted(row for rows in groups for row in rows) == list(range(count))


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model, "float32")


@pytest.fixture(scope="module")
def requests():
    generator = torch.Generator().manual_seed(11)
    sizes = [(40, 6), (16, 1), (33, 19), (9, 5), (64, 3), (49, 4)]
    return [GroupRequest(prompt=tokens(generator, n), seeds=tuple(range(n, n + count))) for n, count in sizes]


class Checked:
    """An engine that keeps account of what is shared, though its attention takes no notice; every window is checked."""

    def __init__(self, monkeypatch, model, **given):
        monkeypatch.setattr(known, "SHARED_LEAST", PAGE_SIZE)
        self.engine = Engine(model, **{"slots": 24, "max_length": 100, **given})
        self.decoder, self.state = self.engine.decoder, self.engine.decoder.state
        self.sent, self.windows, self.most, self.ended = 0, 0, 0, 0
        self._share, self._run = self.state.share, self.decoder.run
        self.decoder.shares = True
        monkeypatch.setattr(self.state, "share", self.share)
        monkeypatch.setattr(self.decoder, "run", self.run)

    def share(self, starts, groups):
        self.sent += 1
        self._share(starts, groups)

    def run(self, count, steps, pages, *, truncates):
        self.windows += 1
        if self.state.shares:
            self.check(self.state.rows(0, count), self.state.rows(0, len(self.state._starts)))
        self._run(count, steps, pages, truncates=truncates)

    def check(self, rows, all_rows):
        starts = rows.starts.tolist()
        groups = [[row for row in members if row >= 0] for members in rows.members.tolist()]
        assert not any(all_rows.starts.tolist()[len(starts) :])
        assert (all_rows.members[len(groups) :] == -1).all()
        sharing = sorted(row for members in groups for row in members)
        assert sharing == [row for row, start in enumerate(starts) if start]
        self.most = max(self.most, len(sharing))
        for members, whole in zip(groups, rows.members.tolist(), strict=True):
            if not members:
                continue
            assert 4 <= len(members) <= 16
            assert members == whole[: len(members)], "the first is there"
            [start] = {starts[row] for row in members}
            tables = rows.page_table[members, : start // PAGE_SIZE]
            assert start % PAGE_SIZE == 0
            assert (tables == tables[0]).all()
            assert min(self.engine.pages._users[page] for page in tables[0].tolist()) >= len(members)
            assert (rows.length[members] >= start).all(), "nobody writes there"
            self.ended += not rows.running[members[0]]


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert dataclasses.replace(one, logprobs=()) == dataclasses.replace(other, logprobs=())
        assert one.logprobs == pytest.approx(other.logprobs, rel=0, abs=1e-6)


@pytest.mark.parametrize(
    "given", [{}, {"window": 4}, {"window": 3, "slots": 9}, {"window": 4, "cache_tokens": 16 * 30}, {"window": 16}]
)
def test_tables_are_right_in_every_window(monkeypatch, model, requests, given):
    checked = Checked(monkeypatch, model, **given)
    assert_same(
        checked.engine.generate(requests, SAMPLING),
        Engine(model, slots=40, max_length=100).generate(requests, SAMPLING),
    )
    assert checked.most >= 6
    assert checked.engine.pages.free == checked.engine.pages.total


def test_the_table_is_sent_when_rows_change_and_the_first_may_have_ended(monkeypatch, model, requests):
    checked = Checked(monkeypatch, model, window=2)
    checked.engine.generate(requests, SAMPLING)
    assert checked.ended > 0, "on the device, which the host does not know yet"
    steady = Checked(monkeypatch, model, window=2)
    steady.engine.generate(requests[:1], dataclasses.replace(SAMPLING, ignore_eos=True))
    assert (steady.sent, steady.windows) == (1, 15)


def test_newcomers_share_with_those_that_are_there(monkeypatch, model, requests):
    checked = Checked(monkeypatch, model, window=2, slots=32)
    session = checked.engine.session()
    for number, together in ((0, 6), (2, 6 + 19)):
        session.submit(number, requests[number], dataclasses.replace(SAMPLING, ignore_eos=True))
        session.advance()
        assert (checked.most, checked.state.rows(0, 32).starts.count_nonzero()) == (together, together)
    session.close()


def test_requests_that_come_and_go(monkeypatch, model, requests):
    chance = random.Random(3)
    checked = Checked(monkeypatch, model, window=3, slots=12, cache_tokens=16 * 32)
    session, forever = checked.engine.session(), dataclasses.replace(SAMPLING, ignore_eos=True)
    waiting = list(enumerate(requests * 3))
    kept = {}
    while waiting or not session.idle:
        for key, request in waiting[:2]:
            session.submit(key, request, SAMPLING if key % 2 else forever)
        waiting = waiting[2:]
        for drawn in session.advance():
            kept.setdefault((drawn.key, drawn.index), []).extend(drawn.token_ids)
        if chance.random() < 0.3:
            session.cancel(cancelled := chance.randrange(12))
            kept = {place: ids for place, ids in kept.items() if place[0] != cancelled}
    for key, request in list(enumerate(requests * 3))[12:]:
        want = Engine(model, slots=40, max_length=100).generate([request], SAMPLING if key % 2 else forever)
        assert [tuple(kept[key, index]) for index in range(len(want))] == [sample.token_ids for sample in want]
    assert checked.most >= 4
    assert checked.engine.pages.free == checked.engine.pages.total


def test_steps_that_share_are_captured_apart(monkeypatch, model, requests):
    checked = Checked(monkeypatch, model, window=4)
    graphs = checked.engine.graphs
    graphs._capture = lambda step: (step(), step)[1]
    endless = dataclasses.replace(SAMPLING, ignore_eos=True, max_tokens=9)
    checked.engine.generate(requests[1:2], endless)
    assert list(graphs._replays) == [Kind(16, False, False)]
    checked.engine.generate(requests[:1], endless)
    assert list(graphs._replays) == [Kind(16, False, False), Kind(16, False, True)]


@pytest.mark.parametrize(
    ("dtype", "given", "shares"),
    [
        (torch.bfloat16, {}, True),
        (torch.bfloat16, {"share_prefix": False}, False),
        (torch.bfloat16, {"deterministic": True}, False),
        (torch.float32, {}, False),
    ],
)
def test_who_shares(tiny_model, dtype, given, shares):
    """Those with kernels of our own, unless company must not matter."""
    traced = random_model(AutoConfig.from_pretrained(tiny_model), traced_target((9, 0), 8 << 30), dtype=dtype)
    assert Engine(traced, slots=4, max_length=64, **given).decoder.shares == shares


def test_nobody_shares_on_a_cpu(model):
    assert not Engine(model, slots=4, max_length=64).decoder.shares


def test_a_rehearsal_reads_as_the_run_does(monkeypatch, model, requests):
    checked = Checked(monkeypatch, model)
    checked.engine.rehearse(requests[:1], SAMPLING)
    assert (checked.windows, checked.most) == (1, 6)
