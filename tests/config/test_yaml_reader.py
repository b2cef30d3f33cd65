import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.base.errors import ConfigError
from ullage.config.yaml_reader import MAX_BYTES, read_file, read_text, resolve_plain, write_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1.e-6", 1e-6), ("1E6", 1e6), ("-2.5", -2.5), (".5", 0.5), ("3.", 3.0), ("+7", 7), ("012", 12),
        ("0x1F", 31), ("0o17", 15), (".inf", math.inf), ("-.inf", -math.inf), ("null", None), ("~", None), ("", None),
        ("true", True), ("True", True), ("FALSE", False), ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"),
        ("2024-01-01", "2024-01-01"), ("1_000", "1_000"), ("12:30", "12:30"), ("e5", "e5"), (".", "."), ("-", "-"),
    ],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2(text, value):
    found = resolve_plain(text)
    assert found == value
    assert type(found) is type(value)


def test_quoted_scalars_are_text():
    assert read_text("""{a: "1e-6", b: 'true', c: "null"}""", "x") == {"a": "1e-6", "b": "true", "c": "null"}


def test_nested_values():
    assert read_text("a:\n  - 1\n  - {b: no}\nc: &x [1, 2]\nd: *x\n", "x") == {
        "a": [1, {"b": "no"}],
        "c": [1, 2],
        "d": [1, 2],
    }


def failure(text):
    with pytest.raises(ConfigError) as caught:
        read_text(text, "run.yaml")
    assert caught.value.code == 78
    assert caught.value.remedy
    return caught.value.cause


def test_duplicate_key_names_both_lines():
    assert failure("a: 1\nb: 2\na: 3\n") == "run.yaml:3: duplicate key 'a', first given on line 1"
    assert failure("s:\n  x: 1\n  x: 1\n") == "run.yaml:3: duplicate key 'x', first given on line 2"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "a: !!python/object/apply:os.system [ls]",
            "run.yaml:1: the tag !!python/object/apply:os.system is not allowed",
        ),
        ("b: 1\na: !!python/name:os.system", "run.yaml:2: the tag !!python/name:os.system is not allowed"),
        ("a: !custom 1", "run.yaml:1: the tag !custom is not allowed"),
        ("1: x", "run.yaml:1: the key 1 is not text"),
        ("[a]: x", "run.yaml:1: the key ['a'] is not text"),
        ("a: &x [*x]", "run.yaml:1: nested more than 64 levels deep"),
    ],
)
def test_refused_with_a_line(text, cause):
    assert failure(text) == cause


def test_broken_yaml_names_the_line():
    assert failure("a: 1\nb: [1, 2\nc: 3\n").startswith("run.yaml:3: not valid YAML: ")
    assert failure("a: 1\n\tb: 2").startswith("run.yaml:2: not valid YAML: ")
    assert failure("a: 1\n---\nb: 2\n").startswith("run.yaml:2: not valid YAML: ")
    assert failure("a: \x01").startswith("run.yaml: not valid YAML: ")


def test_a_bomb_of_aliases_is_refused_quickly():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "unfolds to more than 20,000 values" in failure("\n".join(lines))


def test_deep_nesting_is_refused():
    assert "nested" in failure("a: " + "[" * 5000)
    assert "nested more than 64 levels" in failure("a: " + "[" * 70 + "]" * 70)


def test_very_long_numbers_do_not_crash():
    assert read_text("a: " + "9" * 5000, "x")["a"] == math.inf


def test_files(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_file(path) == {"a": 1}
    path.write_bytes(b"")
    assert read_file(path) is None
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match=r"run.yaml is not UTF-8 text \(byte 3\)"):
        read_file(path)
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="is larger than 1,000,000 bytes"):
        read_file(path)
    with pytest.raises(ConfigError, match=r"cannot read the config .*missing.yaml: No such file or directory"):
        read_file(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"cannot read the config .*: Is a directory"):
        read_file(tmp_path)


plain_text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
tricky = st.sampled_from(
    ["1e-6", "0o17", "no", "null", "", " a", "a: b", "#x", "'", '"', "~", "-", "- a", "[x", "{", "*a", "&a", "!t", "\n"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | plain_text | tricky
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text | tricky, inner, max_size=3)
)


@settings(deadline=None)
@given(values)
def test_what_is_written_reads_back_the_same(value):
    assert read_text(write_text({"key": value}), "x") == {"key": value}


@settings(deadline=None)
@given(st.text(max_size=60))
def test_no_text_raises_anything_but_a_config_error(text):
    with contextlib.suppress(ConfigError):
        read_text(text, "x")
