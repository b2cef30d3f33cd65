"""What earlier runs measured: the largest of the newest counts, and a file that is damaged or in the way is no harm."""

import json
from pathlib import Path

import pytest

from ullage.base.errors import WriteError
from ullage.planner.corrections import KEPT, LARGEST, Corrections, Place

PLACE = Place(device="NVIDIA H200", driver="580.95", torch="2.13.0", kind="full")


@pytest.fixture
def corrections(tmp_path):
    return Corrections(tmp_path / "cache" / "corrections.json")


def test_nothing_is_known_at_first(corrections):
    assert corrections.scale(PLACE) == {}


def test_the_largest_of_the_newest_runs_counts(corrections):
    for ratio in (1.02, 1.05, 1.01):
        corrections.remember(PLACE, {"update": ratio, "rollout": 0.8})
    assert corrections.scale(PLACE) == {"update": 1.05}  # a rollout of short answers says nothing about long ones
    for _ in range(KEPT - 1):
        corrections.remember(PLACE, {"update": 1.03})
    assert corrections.scale(PLACE) == {"update": 1.03}
    assert len(json.loads(corrections.path.read_text())[PLACE.name]) == KEPT


@pytest.mark.parametrize("other", [{"device": "NVIDIA L4"}, {"driver": "590.1"}, {"torch": "2.11.0"}, {"kind": "lora"}])
def test_it_holds_for_one_place(corrections, other):
    corrections.remember(PLACE, {"update": 1.1})
    elsewhere = Place(**{"device": "NVIDIA H200", "driver": "580.95", "torch": "2.13.0", "kind": "full", **other})
    assert corrections.scale(elsewhere) == {}
    corrections.remember(elsewhere, {"update": 1.2})
    assert (corrections.scale(PLACE), corrections.scale(elsewhere)) == ({"update": 1.1}, {"update": 1.2})


def test_a_plan_that_was_all_wrong_is_not_multiplied(corrections):
    corrections.remember(PLACE, {"update": 50.0})
    assert corrections.scale(PLACE) == {"update": LARGEST}


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '"text"', "\ud800", '{"a": 3}', '{"a": [3]}', '{"a": [{"update": "x"}]}', '{"a": [{"update": NaN}]}',
     '{"a": [{"update": -1}]}'],
)  # fmt: skip
def test_a_damaged_file_is_told_and_then_replaced(corrections, text):
    corrections.path.parent.mkdir()
    corrections.path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError):  # noqa: PT011 -- of whatever wording
        corrections.scale(PLACE)
    corrections.remember(PLACE, {"update": 1.1})
    assert corrections.scale(PLACE) == {"update": 1.1}


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(WriteError, match="cannot write"):
        Corrections(tmp_path / "cache" / "corrections.json").remember(PLACE, {"update": 1.1})


def test_it_is_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Corrections().path == tmp_path / "ullage" / "corrections.json"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert Corrections().path == Path(tmp_path / "home" / ".cache" / "ullage" / "corrections.json")
