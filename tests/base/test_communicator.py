"""The communicator of one rank gives back what it is given."""

import pytest
import torch

from ullage.base.communicator import Solo
from ullage.base.errors import DataError


def test_solo_is_the_identity():
    solo = Solo()
    tensor = torch.tensor([1.0, 2.0])
    solo.sum_tensor_(tensor)
    assert (solo.rank, solo.size) == (0, 1)
    assert solo.sum((1.0, 2.5)) == [1.0, 2.5]
    assert solo.max((1.0, -2.5)) == [1.0, -2.5]
    assert tensor.tolist() == [1.0, 2.0]
    assert solo.gather({"a": [1]}) == [{"a": [1]}]


def test_solo_raises_what_it_is_given():
    Solo().raise_together(None)
    error = DataError("broken", "fix it")
    with pytest.raises(DataError) as caught:
        Solo().raise_together(error)
    assert caught.value is error
