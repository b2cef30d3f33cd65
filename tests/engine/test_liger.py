"""Liger is an extra: asked for where it cannot work, the run is refused with what to do."""

import sys

import pytest

from ullage.base.errors import ConfigError
from ullage.engine.liger import use_liger
from ullage.model.target import Target

CPU, GPU = Target("cpu", 0, (0, 0), 8 << 30), Target("cuda", 0, (9, 0), 80 << 30)


def test_a_cpu_has_no_use_for_it():
    with pytest.raises(ConfigError, match="its kernels run on CUDA only"):
        use_liger(None, CPU)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ConfigError, match="liger-kernel is not installed") as caught:
        use_liger(None, GPU)
    assert "pip install 'ullage[liger]'" in caught.value.remedy
