"""What Python's garbage collector may leave alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled_garbage() -> Iterator[None]:
    """Collections look only at what is made from here on.

    Libraries leave half a million objects behind: a third of a second for every collection that goes through them all,
    in the middle of whatever the process is doing. Those inside each other stay until here; what ends otherwise ends as
    ever.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
