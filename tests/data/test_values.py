import datetime
import uuid

import numpy
import pytest

from ullage.base.errors import DataError
from ullage.data.values import plain


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (numpy.int64(3), 3),
        (numpy.float32(0.5), 0.5),
        (numpy.float64("nan"), None),
        (numpy.bool_(True), True),
        (numpy.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (("a", None), ["a", None]),
        ({1: {"b": b"c"}}, {"1": {"b": "c"}}),
        (datetime.time(1, 2), "01:02:00"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    ],
)
def test_plain(value, expected):
    result = plain(value, "here")
    assert result == expected
    assert type(result) is type(expected)


def test_value_without_a_json_form():
    with pytest.raises(DataError, match="here: cannot use a value of type complex"):
        plain([1j], "here")
