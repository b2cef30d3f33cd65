"""Passes over prompts: what the model is given, and that the host hands it over without waiting for the device."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from experience_samples import load, tokens
from ullage.model import attention
from ullage.model.head import MIN_ROWS
from ullage.model.random_weights import random_model
from ullage.model.target import put
from ullage.rollout.embedded import decoder, pages, state
from ullage.rollout.embedded.decoder import Text, pack
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.embedded.layouts import PrefillLayout
from ullage.rollout.embedded.pages import PAGE_SIZE, pages_for
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.run.trace_phases import traced_target

aten = torch.ops.aten


def plain(texts):
    """Token by token: its id, its position, and the place that its page gives it."""
    return [
        (token, position, text.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
        for text in texts
        for position, token in enumerate(text.token_ids)
    ]


def ragged(*lengths, spare=0):
    """In pages of a shuffled arena, with some that are not reached yet."""
    generator = torch.Generator().manual_seed(len(lengths))
    free = torch.randperm(200, generator=generator).tolist()
    return [Text(tokens(generator, n), [free.pop() for _ in range(pages_for(n) + spare)]) for n in lengths]


def test_tokens_of_two_texts_by_hand():
    packed = pack([Text(tuple(range(50, 67)), [3, 1, 9]), Text((7, 8), [5])])
    assert packed.ids.tolist() == [*range(50, 67), 7, 8]
    assert packed.positions.tolist() == [*range(17), 0, 1]
    assert packed.places.tolist() == [*range(48, 64), 16, 80, 81]


@pytest.mark.parametrize(
    "texts",
    [ragged(1), ragged(16), ragged(40, 1, 16, 17, 33), ragged(5, 31, 64, spare=2), [Text((4, 5), [2, 6])] * 3],
    ids=["one token", "one page", "ragged", "with pages to grow into", "the same pages"],
)
def test_texts_are_packed_as_token_by_token(texts):
    packed = pack(texts)
    assert list(zip(*(part.tolist() for part in packed), strict=True)) == plain(texts)
    assert {part.dtype for part in packed} == {torch.long}


class Listening:
    """A model that notes what it is to prefill."""

    def __init__(self, model):
        self.model, self.passes = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def hidden(self, input_ids, positions, layout):
        if isinstance(layout, PrefillLayout):
            given = (part.tolist() for part in (input_ids[0], positions[0], layout.places))
            self.passes.append((list(zip(*given, strict=True)), [(span.start, span.prompt) for span in layout.spans]))
        return self.model.hidden(input_ids, positions, layout)


@pytest.fixture(scope="module")
def model(tiny_model):
    return load(tiny_model, "float32")


def prefilled(model, texts, max_tokens, **given):
    """The passes that the model was given, and what it says of the last token of each text."""
    listening = Listening(model)
    engine = Engine(listening, slots=16, max_length=200, **given)
    with torch.no_grad():
        hidden = engine.decoder.prefill(texts, max_tokens)
    return listening.passes, hidden


def test_a_pass_has_whole_texts_and_the_model_gets_their_tokens(model):
    texts = ragged(40, 25, 30, 3, 70)
    passes, hidden = prefilled(model, texts, 66)
    assert passes == [
        (plain(texts[:2]), [(0, 40), (40, 25)]),
        (plain(texts[2:4]), [(0, 30), (30, 3)]),
        (plain(texts[4:]), [(0, 70)]),
    ]
    together = prefilled(model, texts, 1000)[1]
    for one, other in zip(hidden, together, strict=True):
        assert torch.equal(one, other)


def test_deterministic_passes_have_one_text_each(model):
    texts = ragged(40, 25, 33)
    passes, hidden = prefilled(model, texts, 1000, deterministic=True)
    assert passes == [(plain([text]), [(0, len(text.token_ids))]) for text in texts]
    assert len(hidden) == 3


def test_a_short_pass_on_a_cpu_repeats_its_first_text(model):
    texts = ragged(5, 2)
    times = 1 + -(-(MIN_ROWS - 7) // 5)
    passes, hidden = prefilled(model, texts, 1000)
    spans = [(0, 5), (5, 2), *((7 + 5 * i, 5) for i in range(times - 1))]
    assert passes == [(plain([*texts, *texts[:1] * (times - 1)]), spans)]
    assert len(hidden) == 2


class Pageable:
    """Numbers in ordinary memory that note what becomes of them."""

    def __init__(self):
        self.done = []

    def pin_memory(self):
        self.done.append("pinned")
        return self

    def to(self, device, *, non_blocking):
        self.done.append((device.type, non_blocking))
        return self


def test_what_goes_to_a_gpu_is_pinned_first():
    values = Pageable()
    put(values, torch.device("cuda"))
    assert values.done == ["pinned", ("cuda", True)]
    values = Pageable()
    put(values, torch.device("cpu"))
    assert values.done == [("cpu", True)]


THREADED = (aten.index.Tensor, aten.index_select.default, aten.nonzero.default, aten.repeat_interleave.Tensor)
"""Operators for which torch wakes its threads on a host, however few the numbers are."""


class Copies(TorchDispatchMode):
    """Notes copies from the host to the traced device that were not made by those that may, and threads' work."""

    def __init__(self):
        super().__init__()
        self.allowed, self.made, self.others, self.threaded = False, 0, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in THREADED and args[0].device.type == "cpu":
            self.threaded.append(func.name())
        source, device = None, None
        if func is aten._to_copy.default:
            source, device = args[0], kwargs.get("device")
        elif func is aten.copy_.default:
            source, device = args[1], args[0].device
            if source.device.type == "meta" and device.type == "cpu":
                return args[0]  # what comes back is nothing
        if source is not None and source.device.type == "cpu" and device is not None and device.type == "meta":
            self.made += 1
            if not self.allowed:
                self.others.append((func.name(), tuple(source.shape)))
        return func(*args, **kwargs)

    def allow(self, function):
        def allowed(*args):
            self.allowed = True
            try:
                return function(*args)
            finally:
                self.allowed = False

        return allowed


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_device_waits_for_no_copy_and_no_thread_of_the_host(tiny_architecture, architecture, monkeypatch):
    """Prompts, newcomers, copies of partly filled pages, shared beginnings, rows that move, pages that are granted."""
    target = traced_target((9, 0), 150_110_011_392)
    traced = random_model(AutoConfig.from_pretrained(tiny_architecture(architecture)), target, dtype=torch.bfloat16)
    engine = Engine(traced, slots=12, max_length=200)
    copies = Copies()
    for place in (decoder, state, pages, attention):
        monkeypatch.setattr(place, "put", copies.allow(put))
    with copies:
        session = engine.session()
        for key, prompt in enumerate((130, 20, 33)):
            request = GroupRequest(prompt=tuple(range(prompt)), seeds=(1, 2, 3, 4))
            session.submit(key, request, Sampling(max_tokens=40, ignore_eos=True))
        session.advance()
        first = copies.made
        session.cancel(1)
        session.advance()
        session.close()
    # A pass: ids, positions, places, ends of queries and of keys, last tokens. Pages copied: two lists. Newcomers:
    # three tables. Beginnings: two.
    assert first == 6 + 2 + 3 + 2
    assert copies.made == first + 1 + 1 + 2, "the order of rows; rows, places and pages at once; beginnings"
    assert copies.others == [], "out of ordinary memory"
    assert copies.threaded == []
