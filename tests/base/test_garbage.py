"""Garbage collections that leave alone what was there before."""

import gc
import weakref

import pytest

from ullage.base.garbage import settled_garbage


class Knot:
    """Refers to itself, so that only a collection ends it."""

    def __init__(self):
        self.itself = self


def test_old_objects_are_left_alone_and_new_ones_collected():
    gone, old = weakref.ref(Knot()), Knot()
    with settled_garbage():
        assert gone() is None, "garbage of before is collected first"
        assert gc.get_freeze_count() > 10_000
        old, kept = weakref.ref(old), old
        del kept
        new = weakref.ref(Knot())
        gc.collect()
        assert new() is None
        assert old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def test_an_error_ends_it_too():
    with pytest.raises(ValueError, match="wrong"), settled_garbage():
        raise ValueError("wrong")
    assert gc.get_freeze_count() == 0
