"""The update's peers get the same batch and compute the same gradient, so that only their speed differs."""

import importlib.util

import pytest
import torch

from ullage.bench.batches import PROMPT
from ullage.bench.clock import Measured
from ullage.bench.peers import Arena, Contender, Trial, padded_batches, peers, twin
from ullage.bench.shapes import shape_config
from ullage.bench.update import Workload
from ullage.model import attention
from ullage.model.random_weights import random_module
from ullage.model.target import Target

CPU = Target("cpu", 0, (0, 0), 8 << 30)
WORKLOAD = Workload(shape="tiny", tokens=512, micro_batch=128, mean=64, cap=128)
NO_TRL = importlib.util.find_spec("trl") is None


@pytest.fixture(scope="module")
def arena():
    return Arena(WORKLOAD, CPU, lambda line: None)


def gradient(arena, contender):
    arena.actor.optimizer.zero_grad()
    contender.prepare()
    contender.work()
    return arena.actor.optimizer.gradient.clone()


def test_padding_by_hand(arena):
    sizes = [length - PROMPT for length in arena.lengths]
    parts = padded_batches(arena.batch, Trial(sequences=2, padded=4, recompute=False), CPU)
    assert [len(part.advantages) for part in parts][:2] == [2, 2]
    assert sum(len(part.advantages) for part in parts) == len(sizes)
    # The third and fourth sequence are padded to the longest of the first four.
    assert parts[1].completion_ids.shape == (2, max(sizes[:4]))
    assert parts[1].completion_mask.sum(1).tolist() == sizes[2:4]
    assert tuple(parts[1].completion_ids[0, : sizes[2]].tolist()) == arena.batch.responses[2]
    assert not parts[1].completion_ids[0, sizes[2] :].any()
    assert tuple(parts[1].prompt_ids[1].tolist()) == arena.batch.prompts[3]
    assert parts[1].advantages.tolist() == arena.batch.advantages_NT[2:4, 0].float().tolist()


def test_a_twin_has_the_same_weights_and_layers_of_its_own():
    module = random_module(shape_config("tiny"), torch.float32, CPU.device, implementation="sdpa")
    other = twin(module, attention.NAME)
    assert [id(p) for p in other.parameters()] == [id(p) for p in module.parameters()]
    assert other.get_submodule("model.layers.0") is not module.get_submodule("model.layers.0")
    assert (module.config._attn_implementation, other.config._attn_implementation) == ("sdpa", attention.NAME)


def test_the_plain_step_computes_our_gradient(arena):
    (ours,) = arena.ours()
    (plain,) = arena.plain()
    want = gradient(arena, ours)
    assert want.abs().max() > 1e-4
    torch.testing.assert_close(gradient(arena, plain), want, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.skipif(NO_TRL, reason="trl is not installed")
def test_trl_computes_our_gradient_whatever_its_settings(arena):
    (ours,) = arena.ours()
    want = gradient(arena, ours)
    theirs = arena.trl()
    assert len(theirs) > 1
    for contender in theirs:
        torch.testing.assert_close(gradient(arena, contender), want, rtol=1e-4, atol=1e-7)


def test_rows_are_compared_with_the_best_of_trl(arena):
    best = Contender("trl", "", lambda: None, measured=[Measured(3.0, 0), Measured(2.0, 0), Measured(9.0, 0)])
    ours = Contender("ullage", "", lambda: None, measured=[Measured(1.0, 4 << 30), Measured(2.0, 6 << 30)])
    row = arena.row(ours, best)
    assert (row["update_s"], row["ratio"], row["peak_gib"]) == (1.5, 2.0, 6.0)
    assert row["tokens_per_s"] == round(sum(arena.lengths) / 1.5)
    assert arena.row(ours, None)["ratio"] is None


def test_what_does_not_fit_is_left_out_and_said(arena):
    def too_large():
        raise torch.OutOfMemoryError("no")

    said = []
    arena.say = said.append
    assert not arena.tried(Contender("trl", "micro_batch=64", too_large))
    assert said == ["trl (micro_batch=64): out of memory"]


def test_without_trl_its_rows_are_left_out_and_said(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trl" else find(name))
    said = []
    rows = list(peers(WORKLOAD, CPU, rounds=1, repeat=1, say=said.append))
    assert [row["contender"] for row in rows] == ["ullage", "hugging face"]
    assert "trl is not installed: its rows are left out" in said
