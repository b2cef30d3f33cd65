"""Out-of-memory replay: what is repeated, with which budget, and what no longer holds memory meanwhile."""

import weakref

import pytest
import torch

from ullage.batch.pack import Limits
from ullage.engine.replay import Extent, Replayer, Replays, is_out_of_memory, reduced


class Failing:
    """Work that fits passes of so many tokens, and remembers with which limits it was tried."""

    def __init__(self, fits, error=torch.OutOfMemoryError):
        self.fits, self.error = fits, error
        self.tried = []

    def on(self, replayer):
        def work():
            self.tried.append(replayer.limits.max_tokens)
            if replayer.limits.max_tokens > self.fits:
                raise self.error("CUDA error: out of memory")
            return "done"

        return work


@pytest.mark.parametrize(
    ("limits", "extent", "expected"),
    [
        (Limits(max_tokens=100), Extent(30, 500, 20), Limits(max_tokens=50)),
        (Limits(max_tokens=100), Extent(80, 500, 20), Limits(max_tokens=80)),  # never below one sequence
        (Limits(max_tokens=80), Extent(80, 500, 20), None),
        (Limits(max_tokens=9000), Extent(30, 100, 20), Limits(max_tokens=50)),  # the budget was not what bound
        (Limits(max_tokens=9000), Extent(30, 30, 1), None),
        (Limits(max_tokens=9000, max_sequences=4), Extent(30, 900, 50), Limits(max_tokens=60, max_sequences=2)),
        (Limits(max_tokens=30, max_sequences=4), Extent(30, 900, 50), Limits(max_tokens=30, max_sequences=2)),
        (Limits(max_tokens=9000, max_sequences=64), Extent(30, 90, 3), Limits(max_tokens=45, max_sequences=1)),
        (Limits(max_tokens=9000, max_sequences=1), Extent(30, 900, 50), None),
        (Limits(max_tokens=100, share_prefix=False), Extent(20, 500, 40), Limits(max_tokens=50, share_prefix=False)),
        (Limits(max_tokens=100), Extent(0, 0, 0), None),
    ],
)
def test_the_largest_pass_is_halved(limits, extent, expected):
    assert reduced(limits, extent, 2) == expected
    assert reduced(limits, extent, 1) is limits


def test_the_budget_is_halved_until_it_fits_and_stays():
    said = []
    replays = Replays(say=said.append)
    replayer = Replayer(Limits(max_tokens=1000), replays, advice=lambda limits: f"key={limits.max_tokens}")
    work = Failing(fits=300)
    assert replayer.run("update", Extent(100, 5000, 60), work.on(replayer)) == "done"
    assert work.tried == [1000, 500, 250]
    assert replayer.run("update", Extent(100, 5000, 60), work.on(replayer)) == "done"
    assert work.tried == [1000, 500, 250, 250]
    assert said == [
        "update ran out of memory: repeated, and from now on done, in passes of 500 instead of 1000 tokens; "
        "to begin with that, set key=500",
        "update ran out of memory: repeated, and from now on done, in passes of 250 instead of 500 tokens; "
        "to begin with that, set key=250",
    ]


def test_a_longer_sequence_widens_a_budget_that_had_shrunk():
    replayer = Replayer(Limits(max_tokens=1000), Replays())
    replayer.run("update", Extent(100, 5000, 60), Failing(fits=200).on(replayer))
    assert replayer.limits.max_tokens == 125
    assert replayer.fit(Extent(400, 5000, 60)).max_tokens == 400
    assert replayer.fit(Extent(2000, 5000, 60)).max_tokens == 1000  # too long in any case: the packing says so


def test_advice_is_a_value_that_the_config_accepts():
    said = []
    replays = Replays(say=said.append, longest=700)
    replayer = Replayer(Limits(max_tokens=1000), replays, advice=lambda limits: f"key={limits.max_tokens}")
    replayer.run("update", Extent(100, 5000, 60), Failing(fits=300).on(replayer))
    assert [line.partition("; ")[2] for line in said] == ["to begin with that, set key=700", ""]


def test_nothing_left_to_halve():
    replayer = Replayer(Limits(max_tokens=1000), Replays())
    work = Failing(fits=0)
    with pytest.raises(torch.OutOfMemoryError):
        replayer.run("update", Extent(400, 5000, 60), work.on(replayer))
    assert work.tried == [1000, 500, 400]


def test_switched_off():
    replayer = Replayer(Limits(max_tokens=1000), Replays(enabled=False))
    work = Failing(fits=0)
    with pytest.raises(torch.OutOfMemoryError):
        replayer.run("update", Extent(1, 5000, 60), work.on(replayer))
    assert work.tried == [1000]


def test_other_errors_are_not_repeated():
    replayer = Replayer(Limits(max_tokens=1000), Replays())
    tried = []

    def work():
        tried.append(1)
        raise RuntimeError("a bug of ours")

    with pytest.raises(RuntimeError, match="a bug of ours"):
        replayer.run("update", Extent(1, 5000, 60), work)
    assert tried == [1]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_a_real_allocation_that_cannot_be_had_counts():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_the_failed_try_holds_nothing_when_the_next_begins():
    """Its frames would: the traceback knows them, and they know the activations."""
    held, alive = [], []
    replayer = Replayer(Limits(max_tokens=1000), Replays())

    def layer(weights):
        activation = weights * 2
        held.append(weakref.ref(activation))
        if replayer.limits.max_tokens > 500:
            raise torch.OutOfMemoryError("injected")
        return activation

    def work():
        alive.append([ref() is not None for ref in held])
        weights = torch.ones(3, requires_grad=True)
        for hidden in (layer(weights) for _ in range(2)):
            hidden.sum().backward()
        return weights.grad.tolist()

    assert replayer.run("update", Extent(1, 5000, 60), work) == [4.0, 4.0, 4.0]
    assert alive == [[], [False]]


class Ranks:
    """Three ranks, of which this is the first; the others say what they are told to."""

    rank, size = 0, 3

    def gather(self, mine):
        return [mine, ["values ran out"], []]


def test_replays_of_all_ranks_are_counted_once_and_said():
    said = []
    replays = Replays(say=said.append)
    replays.add("update ran out")
    assert replays.of_step(Ranks()) == {"memory/replays": 2.0}
    assert said == ["update ran out", "rank 1: values ran out"]
    assert replays.of_step(Ranks()) == {"memory/replays": 1.0}
