"""Numbers as people read them."""

import pytest

from ullage.base.units import bytes_of, bytes_text, seconds_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (7 << 30, "7.0 GiB"),
        (2 << 40, "2048.0 GiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3700, "1:01:40"), (36000, "10:00:00"), (-3, "0:00")],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 << 30),
        (" 1.5 tib", 3 << 39),
        ("2TB", 2 * 10**12),
        ("24gb", 24 * 10**9),
        ("24", None),
        ("-1GiB", None),
    ],
)
def test_sizes(text, count):
    assert bytes_of(text) == count
