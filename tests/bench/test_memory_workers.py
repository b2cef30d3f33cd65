"""Work in several processes: as much at once as memory allows, all of it done, failures told."""

import atexit
import os
import sys
import time
from concurrent.futures import BrokenExecutor
from functools import partial
from pathlib import Path

from ullage.bench.memory_workers import Job, Room, one_by_one, side_by_side

ROOM = Room(device_bytes=10, host_bytes=100)


def job(number, *, device=1, host=1, seconds=1.0, work=None):
    return Job(work or partial(dict, number=number), number, seconds, device, host)


def test_a_job_starts_where_both_memories_have_room_for_it():
    running = [job(0, device=6, host=50)]
    assert ROOM.has(job(1, device=4, host=50), running)
    assert not ROOM.has(job(1, device=5, host=1), running)
    assert not ROOM.has(job(1, device=1, host=51), running)
    assert ROOM.has(job(1, device=11, host=500), [])  # alone, where it may fail by itself


def test_all_jobs_are_done_and_failures_are_outcomes():
    jobs = [job(0), job(1, work=partial(int, "no number")), job(2, device=20)]
    found = {done.number: outcome for done, outcome in side_by_side(jobs, 2, ROOM, lambda: 10.0)}
    assert found[0] == {"number": 0}
    assert found[2] == {"number": 2}
    assert isinstance(found[1], ValueError)
    assert [done.number for done, _ in one_by_one(jobs, lambda: 10.0)] == [0, 1, 2]


def test_a_process_does_one_job():
    jobs = [job(number, work=os.getpid) for number in range(3)]
    found = {outcome for _, outcome in side_by_side(jobs, 1, ROOM, lambda: 10.0)}
    assert len(found) == 3


def test_processes_have_loaded_before_they_work():
    jobs = [job(number, work=sys.getrecursionlimit) for number in range(3)]
    loads = partial(sys.setrecursionlimit, 4321)
    found = [outcome for _, outcome in side_by_side(jobs, 2, ROOM, lambda: 10.0, load=loads)]
    assert found == [4321] * 3


def test_a_process_keeps_its_memory_until_it_has_ended(tmp_path):
    ended = tmp_path / "ended"
    jobs = [job(0, device=10, work=partial(atexit.register, leave, ended)), job(1, device=9, work=ended.exists)]
    found = {done.number: outcome for done, outcome in side_by_side(jobs, 2, ROOM, lambda: 10.0)}
    assert found[1] is True


def leave(ended):
    time.sleep(0.5)
    ended.touch()


def test_a_process_that_is_killed_takes_nothing_else_with_it():
    jobs = [job(0), job(1, work=partial(os._exit, 9)), job(2), job(3)]
    found = {done.number: outcome for done, outcome in side_by_side(jobs, 1, ROOM, lambda: 10.0)}
    assert isinstance(found.pop(1), BrokenExecutor)
    assert found == {number: {"number": number} for number in (0, 2, 3)}


def test_a_process_that_dies_while_it_waits_is_replaced(tmp_path):
    first = partial(Path.rename, tmp_path / "once", tmp_path / "gone")  # works once
    (tmp_path / "once").touch()
    jobs = [job(number, work=partial(time.sleep, 0.1)) for number in range(4)]
    found = [outcome for _, outcome in side_by_side(jobs, 1, ROOM, lambda: 10.0, load=partial(die, first))]
    assert found == [None] * 4


def die(once):
    try:
        once()
    except FileNotFoundError:
        return
    os._exit(9)


def test_what_there_is_no_time_for_is_left_out():
    jobs = [job(0, seconds=5.0), job(1, seconds=20.0), job(2)]
    assert {done.number for done, _ in side_by_side(jobs, 2, ROOM, lambda: 10.0)} == {0, 2}
    assert [done.number for done, _ in one_by_one(jobs, lambda: 10.0)] == [0]
