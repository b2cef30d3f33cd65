"""The allocator's setting, and that a user's own stays."""

import os

import pytest

from ullage.base.allocator import expand_segments

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
    ],
)
def test_segments_expand_unless_the_user_says_something_else(monkeypatch, before, after):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    expand_segments()
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == after
