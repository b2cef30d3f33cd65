"""Two ranks in two threads: a communicator for what is promised not to depend on how samples are spread."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor


class Rank:
    size = 2

    def __init__(self, rank, slots, barrier):
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def gather(self, value):
        self.slots[self.rank] = json.dumps(value)
        self.barrier.wait()
        parts = [json.loads(slot) for slot in self.slots]
        self.barrier.wait()
        return parts

    def sum(self, values):
        return [sum(parts) for parts in zip(*self.gather(list(values)), strict=True)]


def on_two_ranks(function):
    """[function(communicator of rank 0), function(communicator of rank 1)], run at the same time."""
    slots, barrier = [None, None], threading.Barrier(2, timeout=20)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: function(Rank(rank, slots, barrier)), range(2)))
