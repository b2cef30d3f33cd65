"""A planned peak that is claimed early, on the planner's model of torch's allocator: what is taken, kept and missed."""

import pytest
import torch

from experience_samples import CPU
from ullage.engine.claim import MIB, _segments_grow, claim
from ullage.model.target import Target
from ullage.planner.allocator import CachingAllocator, DoesNotFitError

GPU = Target("cuda", 1, (9, 0), 80 << 30)
GIB = 1 << 30


class Device(CachingAllocator):
    """In the place of torch's allocator, which a CPU does not have; remembers what was asked for at once."""

    def __init__(self, mode="expandable", capacity=None):
        super().__init__(mode, capacity)
        self.mode = mode
        self.asked = []

    def take(self, sizes, device):
        assert device == torch.device("cuda", 1)
        self.asked.append(sizes)
        taken = []
        try:
            for key, size in enumerate(sizes, start=10**6):
                self.allocate(key, size)
                taken.append(key)
        except DoesNotFitError:
            return False
        finally:
            for key in taken:
                self.release(key)
        return True

    def snapshot(self):
        return [{"device": 0, "is_expandable": True}, {"device": 1, "is_expandable": self.mode == "expandable"}]


@pytest.fixture
def place(monkeypatch):
    def put(device, backend="native"):
        monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: backend)
        monkeypatch.setattr("torch.cuda.memory_snapshot", device.snapshot)
        monkeypatch.setattr("torch.cuda.memory_allocated", lambda given: device.allocated)
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda given: device.reserved)
        monkeypatch.setattr("torch.cuda.empty_cache", device.empty_cache)
        _segments_grow.cache_clear()  # of the test before
        monkeypatch.setattr("ullage.engine.claim._take", device.take)
        return device

    return put


@pytest.mark.parametrize(
    ("planned", "allocated", "small"),
    [
        (8 * GIB, 5 * GIB, 64),
        (GIB, 512 * MIB, 15),  # 15.36 MiB are half of the 3 % that a plan leaves
        (60 * MIB, 30 * MIB, 0),
    ],
)
def test_what_is_not_allocated_yet_is_taken_at_once(place, planned, allocated, small):
    device = place(Device())
    device.allocate(1, allocated)
    assert claim(GPU, planned)
    assert device.asked == [[MIB] * small + [planned - allocated]]
    assert device.allocated == allocated
    assert device.reserved >= planned


@pytest.mark.parametrize("planned", [5 * GIB, 4 * GIB, 0])
def test_nothing_is_missing(place, planned):
    device = place(Device())
    device.allocate(1, 5 * GIB)
    assert claim(GPU, planned)
    assert device.asked == []


def test_segments_that_do_not_grow_are_left_alone(place):
    device = place(Device("native"))
    assert claim(GPU, 8 * GIB)
    assert device.asked == []


def test_cudas_own_allocator_is_left_alone(place, monkeypatch):
    def unknown():
        raise RuntimeError("cudaMallocAsync does not yet support snapshots")

    device = place(Device(), backend="cudaMallocAsync")
    monkeypatch.setattr("torch.cuda.memory_snapshot", unknown)
    assert claim(GPU, 8 * GIB)
    assert device.asked == []


def test_a_cpu_has_nothing_to_claim(place):
    device = place(Device())
    assert claim(CPU, 8 * GIB)
    assert device.asked == []


def test_what_cannot_be_had_is_told(place):
    device = place(Device(capacity=6 * GIB))
    device.allocate(1, 5 * GIB)
    assert not claim(GPU, 8 * GIB)
    assert device.allocated == 5 * GIB


def test_small_blocks_are_left_out_where_there_is_no_room_for_them(place):
    device = place(Device(capacity=8 * GIB + 20 * MIB))
    device.allocate(1, 5 * GIB)
    assert claim(GPU, 8 * GIB)
    assert device.asked == [[MIB] * 64 + [3 * GIB], [3 * GIB]]
    assert device.reserved >= 8 * GIB


def test_an_emptied_cache_is_filled_again(place):
    device = place(Device())
    device.allocate(1, 5 * GIB)
    assert claim(GPU, 8 * GIB)
    held = device.reserved
    assert claim(GPU, 8 * GIB)
    assert len(device.asked) == 1
    device.empty_cache()
    assert device.reserved < 8 * GIB
    assert claim(GPU, 8 * GIB)
    assert device.reserved == held
    assert len(device.asked) == 2


def test_gaps_are_not_held_beside_it(place):
    device = place(Device())
    for key, size in enumerate((1, 3, 1), start=1):
        device.allocate(key, size * GIB)
    device.release(2)
    assert claim(GPU, 5 * GIB + GIB // 2)
    assert device.reserved <= 5.5 * GIB + 64 * MIB + 3 * 20 * MIB  # small blocks, and pages at three ends


def steps(device, layers, tokens):
    """Passes that keep a tensor for every layer, with a head at their end; 2 KiB for a token of a layer."""
    for count in tokens:
        for layer in range(layers):
            device.allocate(100 + layer, 2048 * count)
        device.allocate(99, 100_000 * count)
        for key in (*range(100, 100 + layers), 99):
            device.release(key)
    return device.reserved


def test_fuller_and_shorter_passes_find_their_memory(place):
    """At 512 tokens a layer's tensor becomes small, and lies elsewhere."""
    device = place(Device())
    device.allocate(1, 4 * GIB)
    before = steps(device, 24, [900, 800])
    assert steps(device, 24, [900, 800]) == before
    assert claim(GPU, 4 * GIB + 24 * 2048 * 1024 + 100_000 * 1024)
    after = device.reserved
    assert after > before
    assert steps(device, 24, [1024, 850, 512, 300, 1000, 1]) == after
