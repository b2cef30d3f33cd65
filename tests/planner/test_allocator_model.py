"""The allocator model against sequences worked out by hand from the allocator's rules."""

import random

import pytest

from ullage.planner.allocator import MIB, CachingAllocator, DoesNotFitError
from ullage.planner.replay import (
    Allocate,
    Empty,
    Enter,
    Peak,
    Release,
    extrapolate,
    graphs_bytes,
    least_capacity,
    replay,
)


def run(mode, *steps, capacity=None):
    """Positive numbers (key, size) allocate, a bare key frees."""
    allocator = CachingAllocator(mode, capacity)
    for step in steps:
        if isinstance(step, tuple):
            allocator.allocate(*step)
        else:
            allocator.release(step)
    return allocator.allocated, allocator.reserved


@pytest.mark.parametrize("mode", ["native", "expandable"])
def test_sizes_are_rounded_to_512_bytes_and_small_requests_share_a_segment_of_2_mib(mode):
    assert run(mode, (1, 1)) == (512, 2 * MIB)
    assert run(mode, (1, 513), (2, MIB), (3, MIB - 1024)) == (1024 + MIB + MIB - 1024, 2 * MIB)
    assert run(mode, (1, 513), (2, MIB), (3, MIB)) == (1024 + 2 * MIB, 4 * MIB)
    assert run(mode, (1, 0), 1) == (0, 0)


def test_native_segments_are_20_mib_below_10_mib_and_of_their_own_size_from_there():
    assert run("native", (1, MIB + 1)) == (MIB + 512, 20 * MIB)
    assert run("native", (1, 9 * MIB), (2, 9 * MIB)) == (18 * MIB, 20 * MIB)
    assert run("native", (1, 10 * MIB)) == (10 * MIB, 10 * MIB)
    assert run("native", (1, 43 * MIB)) == (44 * MIB, 44 * MIB), "1 MiB left over is not split off"
    assert run("native", (1, 43 * MIB - 512)) == (43 * MIB - 512, 44 * MIB), "more than 1 MiB is"


def test_expandable_segments_split_everything_and_map_20_mib_at_a_time():
    assert run("expandable", (1, 43 * MIB)) == (43 * MIB, 60 * MIB)
    assert run("expandable", (1, 43 * MIB), (2, 17 * MIB)) == (60 * MIB, 60 * MIB)
    assert run("expandable", (1, 43 * MIB), (2, 18 * MIB)) == (61 * MIB, 80 * MIB)
    assert run("expandable", (1, 43 * MIB), (2, 512)) == (43 * MIB + 512, 62 * MIB)


def test_the_smallest_free_block_that_fits_is_taken():
    steps = [(1, 40 * MIB), (2, 12 * MIB), (3, 20 * MIB), 1, 2, 3, (4, 12 * MIB), (5, 20 * MIB), (6, 40 * MIB)]
    assert run("native", *steps) == (72 * MIB, 72 * MIB)


def test_neighbours_that_are_free_become_one_block_again():
    steps = [(1, 40 * MIB), 1, (2, 20 * MIB), (3, 20 * MIB), 2, 3, (4, 40 * MIB)]
    assert run("native", *steps) == (40 * MIB, 40 * MIB)
    steps = [(1, 20 * MIB), (2, 20 * MIB), (3, 20 * MIB), 1, 3, 2, (4, 60 * MIB)]
    assert run("native", *steps) == (60 * MIB, 120 * MIB), "native segments never join"
    assert run("expandable", *steps) == (60 * MIB, 60 * MIB)


def test_expandable_fills_a_hole_before_it_uses_the_end_that_could_grow():
    # The free end (5 MiB) is smaller than the hole (20 MiB) but reaches to the unmapped addresses.
    steps = [(1, 20 * MIB), (2, 35 * MIB), 1, (3, 4 * MIB), (4, 16 * MIB), (5, 5 * MIB)]
    assert run("expandable", *steps) == (60 * MIB, 60 * MIB)


def test_a_full_device_gets_wholly_free_segments_back_before_it_fails():
    steps = [(1, 20 * MIB), (2, 20 * MIB), 1, 2]
    assert run("native", *steps, (3, 40 * MIB), capacity=40 * MIB) == (40 * MIB, 40 * MIB)
    held = [(1, 20 * MIB), 1, (2, 10 * MIB)]
    assert run("native", *held, (3, 20 * MIB), capacity=40 * MIB) == (30 * MIB, 40 * MIB)
    with pytest.raises(DoesNotFitError, match="20971520 of 41943039"):
        run("native", *held, (3, 20 * MIB), capacity=40 * MIB - 1)


def test_a_full_device_unmaps_free_pages_of_an_expandable_segment():
    # 1 and 3 free two ranges of pages that do not touch; the small pool then needs a page.
    steps = [(1, 20 * MIB), (2, 20 * MIB), (3, 20 * MIB), 1, 3]
    assert run("expandable", *steps) == (20 * MIB, 60 * MIB)
    assert run("expandable", *steps, (4, 512), capacity=60 * MIB) == (20 * MIB + 512, 22 * MIB)
    assert run("expandable", *steps, (4, 40 * MIB), capacity=60 * MIB) == (60 * MIB, 60 * MIB)
    with pytest.raises(DoesNotFitError):
        run("expandable", *steps, (4, 41 * MIB), capacity=60 * MIB)


def test_pages_given_back_are_mapped_again_in_place():
    steps = [(1, 20 * MIB), (2, 20 * MIB), 1]
    allocator = CachingAllocator("expandable")
    for step in steps:
        allocator.allocate(*step) if isinstance(step, tuple) else allocator.release(step)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator.allocate(3, 20 * MIB)
    assert (allocator.allocated, allocator.reserved) == (40 * MIB, 40 * MIB)


def test_peaks_are_counted_by_phase_and_a_phase_met_twice_keeps_its_highest():
    events = [
        Enter("load"),
        Allocate(1, 20 * MIB),
        Enter("update"),
        Allocate(2, 40 * MIB),
        Release(2),
        Enter("sync"),
        Enter("update"),
        Allocate(3, 12 * MIB),
    ]
    assert replay(events, "native") == {
        "load": Peak(20 * MIB, 20 * MIB),
        "update": Peak(60 * MIB, 60 * MIB),
        "sync": Peak(20 * MIB, 60 * MIB),
    }


def test_least_capacity_is_where_the_replay_starts_to_run():
    # Native segments of 20 and 20 MiB cannot serve 40 MiB: unless freed, it takes 80. Expandable ones can.
    events = [
        Allocate(1, 20 * MIB),
        Allocate(2, 20 * MIB),
        Allocate(3, 512),
        Release(1),
        Release(2),
        Allocate(4, 40 * MIB),
    ]
    assert least_capacity(events, "native", 1) == 42 * MIB
    assert least_capacity(events, "expandable", 1) == 42 * MIB
    pinned = [Allocate(1, 40 * MIB), Release(1), Allocate(2, 12 * MIB), Allocate(3, 30 * MIB)]
    assert least_capacity(pinned, "native", 1) == 70 * MIB


@pytest.mark.parametrize("mode", ["native", "expandable"])
def test_random_programs_leave_nothing_behind(mode):
    draw = random.Random(0)
    allocator = CachingAllocator(mode)
    live, held = {}, 0
    for key in range(4000):
        if live and draw.random() < 0.48:
            allocator.release(live.pop(draw.choice(list(live))))
        else:
            allocator.allocate(key, draw.choice([700, 2**18, 3 * MIB, 11 * MIB, 64 * MIB]))
            live[key] = key
        held = max(held, allocator.allocated)
        assert allocator.allocated <= allocator.reserved
        if key % 500 == 0:
            allocator.empty_cache()
    assert allocator.peak_allocated == held
    for key in live:
        allocator.release(key)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


@pytest.mark.parametrize("mode", ["native", "expandable"])
def test_a_queue_does_not_use_what_another_one_has_cached(mode):
    allocator = CachingAllocator(mode)
    allocator.allocate(1, 40 * MIB, "side")
    allocator.release(1)
    allocator.allocate(2, 40 * MIB)
    assert (allocator.allocated, allocator.reserved) == (40 * MIB, 80 * MIB)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (40 * MIB, 40 * MIB)


@pytest.mark.parametrize("mode", ["native", "expandable"])
def test_what_graphs_have_used_is_theirs_for_good(mode):
    allocator = CachingAllocator(mode, 62 * MIB)
    for key, size in ((1, 40 * MIB), (2, MIB)):
        allocator.allocate(key, size, "graphs")
    for key in (1, 2):
        allocator.release(key)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 42 * MIB)
    allocator.allocate(3, 30 * MIB, "graphs")
    assert allocator.reserved == 42 * MIB, "the next graph lies in the same pool"
    allocator.allocate(4, 20 * MIB)
    with pytest.raises(DoesNotFitError, match="65011712 of 65011712 reserved"):
        allocator.allocate(5, 20 * MIB)


def test_least_capacity_counts_what_graphs_keep_in_every_later_phase():
    captured = [
        Allocate(1, 30 * MIB, "side"),
        Release(1),
        Empty(),
        Allocate(2, 30 * MIB, "graphs"),
        Release(2),
    ]
    events = [Enter("rollout"), *captured, Enter("update"), Allocate(3, 60 * MIB), Release(3)]
    assert graphs_bytes(events) == 40 * MIB
    assert graphs_bytes(events, "native") == 30 * MIB
    assert replay(events) == {"rollout": Peak(30 * MIB, 40 * MIB), "update": Peak(60 * MIB, 100 * MIB)}
    assert least_capacity(events, "expandable", 1) == 100 * MIB
    assert least_capacity(events, "native", 1) == 90 * MIB
    eager = [event for event in events if event not in captured[2:]]
    assert least_capacity(eager, "expandable", 1) == 60 * MIB, "cached by a queue, it comes back when it is needed"


def passes(layers):
    """A forward pass: a buffer of 60 MiB, then 20 MiB a layer kept, of which a head of 100 MiB needs none."""
    kept = [Allocate(10 + layer, 20 * MIB) for layer in range(layers)]
    freed = [Release(event.key) for event in kept]
    return [
        Enter("body"),
        Allocate(0, 60 * MIB),
        Release(0),
        *kept,
        Enter("head"),
        *freed,
        Allocate(1, 100 * MIB),
        Release(1),
    ]


def test_each_moment_grows_along_its_own_line_with_the_layers():
    # With two or four layers the buffer (60) and the head (100) are highest; with ten the layers are.
    shallow = {4: passes(4), 2: passes(2)}
    assert {phase: peak.allocated for phase, peak in replay(passes(4)).items()} == {"body": 80 * MIB, "head": 100 * MIB}
    for layers in (4, 10, 80):
        whole = {phase: peak.allocated for phase, peak in replay(passes(layers)).items()}
        assert extrapolate(shallow, layers) == whole
