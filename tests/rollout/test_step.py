"""One step: what it does to the rows, and that nothing in it waits for the device, whatever the model is made of."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from experience_samples import load
from ullage.model.fast_decoder import FAMILY
from ullage.model.lora import ALL_LINEAR, Settings, new_adapter
from ullage.model.random_weights import random_model
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.state import NOTHING, Row, SlotState
from ullage.rollout.embedded.step import step
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.run.trace_phases import traced_target

H200 = traced_target((9, 0), 150_110_011_392)
EOS = 2


class Watch(TorchDispatchMode):
    """Notes the operators that run, and every tensor of more than a scalar that comes from or goes to the host."""

    def __init__(self):
        super().__init__()
        self.names, self.on_host = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.dim():
                self.on_host.append(func.name())
        return out


def traced_engine(folder, *, quantization=None, lora=False):
    model = random_model(AutoConfig.from_pretrained(folder), H200, dtype=torch.bfloat16, quantization=quantization)
    if lora:
        adapter = new_adapter(model.module, Settings(rank=4, alpha=8), [ALL_LINEAR], 0)
        model = model.adapted("actor", adapter)
    return Engine(model, slots=8, max_length=64)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize(
    ("architecture", "parts"),
    [
        ("llama", {}),
        ("qwen2", {"lora": True}),
        ("qwen3", {"lora": True, "quantization": "nf4"}),
        ("mistral", {"quantization": "int8"}),
        ("gemma2", {}),
        ("gemma3_text", {}),
    ],
)
def test_nothing_in_a_step_touches_the_host(tiny_architecture, architecture, parts, truncates):
    """A value that the host asked for would fail here, as it would fail a capture: the tensors hold none."""
    engine = traced_engine(tiny_architecture(architecture), **parts)
    with torch.no_grad(), Watch() as watch:
        engine.decoder.run(8, 1, engine.decoder.state.pages, truncates=truncates)
    assert watch.on_host == []
    assert watch.names.isdisjoint({"aten::_local_scalar_dense", "aten::nonzero", "aten::item"})
    attention = {"attend_newest"} if architecture in FAMILY else {"fused_store_kv", "attend_at_once"}
    assert {f"ullage::{name}" for name in attention} <= watch.names
    assert "ullage::attend_shared" not in watch.names
    assert ("ullage::least_kept" in watch.names) == truncates
    assert ("ullage::nf4_dequantise" in watch.names) == (parts.get("quantization") == "nf4")


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_shared_beginnings_are_read_apart_without_the_host(tiny_architecture, architecture):
    engine = traced_engine(tiny_architecture(architecture))
    engine.decoder.state.share([16] * 8, [list(range(8))])
    with torch.no_grad(), Watch() as watch:
        engine.decoder.run(8, 1, engine.decoder.state.pages, truncates=False)
    assert watch.on_host == []
    assert {"ullage::attend_shared", "ullage::attend_own", "ullage::merge_partials"} <= watch.names
    assert "ullage::attend_at_once" not in watch.names


def make_state(rows=4, window=3):
    return SlotState(rows, pages=4, window=window, stop_ids=[EOS], dtype=torch.float32, device=torch.device("cpu"))


def row(pages, *, length, last=5, drawn=1, limit=9, seed=7, **sampling):
    return Row(pages, length, last, drawn, limit, seed, Sampling(**sampling))


def test_rows_are_placed_moved_and_given_up():
    state = make_state()
    state.place(0, [row([i, i + 1], length=10 * i, seed=i, temperature=0.5 * i, top_p=0.9) for i in range(3)])
    state.place(3, [row([9], length=7, top_k=3, ignore_eos=True)])
    state.grant([0, 3], [2, 1], [30, 31])
    rows = state.rows(0, 4)
    assert rows.page_table.tolist() == [[0, 1, 30, 0], [1, 2, 0, 0], [2, 3, 0, 0], [9, 31, 0, 0]]
    assert rows.running.tolist() == [1, 1, 1, 1]
    assert rows.temperature.tolist() == [0, 0.5, 1, 1]
    assert rows.top_p.tolist() == pytest.approx([1, 0.9, 0.9, 1]), "greedy needs no truncation"
    most = torch.iinfo(torch.long).max
    assert rows.top_k.tolist() == [most, most, most, 3]
    assert rows.ignore_eos.tolist() == [0, 0, 0, 1]
    state.rearrange([3, 1])
    assert rows.running.tolist() == [1, 1, 0, 0]
    assert rows.length[:2].tolist() == [7, 10]
    assert rows.seed[:2].tolist() == [7, 1]
    assert rows.page_table[:2].tolist() == [[9, 31, 0, 0], [1, 2, 0, 0]]
    assert rows.temperature[:2].tolist() == [1, 0.5]


def test_shared_beginnings_are_noted_for_all_rows():
    state = make_state(rows=9)
    assert not state.shares
    state.share([16, 0, 16, 16, 16, 32, 32], [[0, 2, 3, 4], [5, 6]])
    state.share([0, 16, 16, 16, 16], [[4, 1, 2, 3]])
    assert state.shares
    rows = state.rows(0, 9)
    assert rows.starts.tolist() == [0, 16, 16, 16, 16, 0, 0, 0, 0], "nobody's rows share nothing"
    assert rows.members.tolist() == [[4, 1, 2, 3] + [NOTHING] * 12, [NOTHING] * 16]
    assert state.rows(0, 7).members.tolist() == [[4, 1, 2, 3] + [NOTHING] * 12], "a group for every four rows"
    assert state.rows(0, 3).members.shape == (1, 16)
    state.share([0] * 5, [])
    assert not state.shares


def test_what_was_saved_is_restored():
    state = make_state()
    state.place(0, [row([1], length=3)])
    kept = state.saved()
    state.stop_all()
    state.rows(0, 1).tokens.fill_(1)
    state.rows(0, 1).length.add_(5)
    state.restore(kept)
    rows = state.rows(0, 1)
    assert (rows.running.tolist(), rows.length.tolist(), rows.tokens.tolist()) == ([1], [3], [[NOTHING] * 4])


@torch.no_grad()
def test_a_step_ends_samples_and_leaves_the_others_alone(tiny_model):
    model = load(tiny_model, "float32")
    engine = Engine(model, slots=20, max_length=48, window=2)
    state, pages = engine.decoder.state, engine.pages
    pages.arena.fill_(1)
    # Rows 0 and 1 have one token left, row 2 has many; row 3 has ended and must not write to its page.
    state.place(0, [row([i], length=3, drawn=4, limit=5 if i < 2 else 9, seed=i, ignore_eos=True) for i in range(4)])
    state.rows(3, 4).running.zero_()
    before = pages.arena.clone()
    step(model, pages, state.rows(0, 16), truncates=False)
    rows = state.rows(0, 4)
    assert rows.running.tolist() == [0, 0, 1, 0]
    assert rows.length.tolist() == [4, 4, 4, 3]
    assert rows.drawn.tolist() == [5, 5, 5, 4]
    drawn = rows.tokens[:, 1].tolist()
    assert drawn[3] == NOTHING
    assert rows.last.tolist() == [*drawn[:3], 5]
    assert rows.tokens[:, 0].tolist() == [NOTHING] * 4
    assert state.rows(4, 16).tokens[:, 1].tolist() == [NOTHING] * 12
    changed = (pages.arena != before).flatten(3).any(3).any(1).any(0)  # [pages]
    assert changed.nonzero()[:, 0].tolist() == [0, 1, 2, pages.scratch]
    second = before.clone()
    second[:, :, :3, 3] = pages.arena[:, :, :3, 3]
    assert torch.equal(pages.arena[:, :, :-1], second[:, :, :-1]), "at the fourth place of their pages and nowhere else"
    step(model, pages, state.rows(0, 16), truncates=False)
    assert rows.tokens[:, 2].tolist() == [NOTHING, NOTHING, int(rows.last[2]), NOTHING]
    assert rows.length.tolist() == [4, 4, 5, 3]


@torch.no_grad()
def test_an_end_token_ends_a_sample_unless_it_is_ignored(tiny_model):
    model = load(tiny_model, "float32")
    with torch.no_grad():
        model.head.weight.zero_()[EOS].fill_(1)
        model.module.model.norm.weight.abs_()
    engine = Engine(model, slots=20, max_length=48, window=2)
    state = engine.decoder.state
    greedy = {"length": 1, "temperature": 0.0}
    state.place(0, [row([0], **greedy), row([1], ignore_eos=True, **greedy)])
    hidden = torch.ones(2, model.head.weight.shape[1])
    engine.decoder.start(0, list(hidden), truncates=False)
    rows = state.rows(0, 2)
    assert rows.tokens[:, 0].tolist() == [EOS, EOS]
    assert rows.running.tolist() == [0, 1]
    assert rows.length.tolist() == [1, 1], "a first token is drawn without feeding one"


def test_deterministic_passes_hang_on_nothing_but_a_samples_length(tiny_model):
    """Every text by itself, decoding with all rows, and as many rows for the head."""
    model = load(tiny_model, "float32")
    shapes = []

    class Watched:
        def __getattr__(self, name):
            return getattr(model, name)

        def hidden(self, input_ids, positions, layout):
            shapes.append(input_ids.shape[1])
            return model.hidden(input_ids, positions, layout)

    requests = [GroupRequest(prompt=tuple(range(4, 4 + n)), seeds=(1, 2)) for n in (17, 20, 30)]
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    engine = Engine(Watched(), slots=24, max_length=48, deterministic=True)
    got = engine.generate(requests, sampling)
    assert shapes == [17, 20, 30] + [24] * 5
    assert got == Engine(model, slots=24, max_length=48).generate(requests, sampling)
