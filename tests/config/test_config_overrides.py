import pytest

from ullage.base.errors import ConfigError, UsageError
from ullage.config.overrides import apply_override, parse_override, split_overrides


@pytest.mark.parametrize(
    ("item", "path", "value"),
    [
        ("a.b=1", ["a", "b"], 1),
        ("+a.b=1e-6", ["a", "b"], 1e-6),
        ("++a.b=True", ["a", "b"], True),
        ("a=false", ["a"], False),
        ("a=null", ["a"], None),
        ("a=", ["a"], ""),
        ("a=['console','wandb']", ["a"], ["console", "wandb"]),
        ('a=["console","wandb"]', ["a"], ["console", "wandb"]),
        ("a=[a,b]", ["a"], ["a", "b"]),
        ("a=[1, 2.5]", ["a"], [1, 2.5]),
        ("a={b: 1}", ["a"], {"b": 1}),
        ("a='1'", ["a"], "1"),
        ('a="x y"', ["a"], "x y"),
        ("a=x=y", ["a"], "x=y"),
        ("a=Answer: yes # not a comment", ["a"], "Answer: yes # not a comment"),
        ("a=it's", ["a"], "it's"),
        ("a='", ["a"], "'"),
        ("a=~/data/x.parquet", ["a"], "~/data/x.parquet"),
        ("a=line\nline", ["a"], "line\nline"),
    ],
)
def test_values(item, path, value):
    found = parse_override(item)
    assert found == (path, value)
    assert type(found[1]) is type(value)


@pytest.mark.parametrize("item", ["", "a", "=1", "a..b=1", ".a=1", "~a.b", "a b=1"])
def test_what_is_not_an_override(item):
    with pytest.raises(ConfigError, match="not an override"):
        parse_override(item)


def test_broken_list():
    with pytest.raises(ConfigError, match=r"override a.b:1: not valid YAML"):
        parse_override("a.b=[1, 2")


def test_applied_in_order_and_sections_are_made():
    mapping = {"a": {"b": 1}, "c": None}
    for item in ("a.b=2", "a.x.y=3", "c.d=4", "a.b=5"):
        apply_override(mapping, item)
    assert mapping == {"a": {"b": 5, "x": {"y": 3}}, "c": {"d": 4}}


def test_a_value_is_not_a_section():
    with pytest.raises(ConfigError, match=r"override a.b=1: a is 3, not a section"):
        apply_override({"a": 3}, "a.b=1")


def test_split():
    argv = [
        "run.yaml",
        "--json",
        "a.b=1",
        "--c.d",
        "-1",
        "--e.f=x y",
        "+g.h=2",
        "--name",
        "x",
        "reward=gsm8k",
        "--",
        "i.j=3",
    ]
    assert split_overrides(argv) == (
        ["a.b=1", "c.d=-1", "e.f=x y", "+g.h=2", "reward=gsm8k"],
        ["run.yaml", "--json", "--name", "x", "--", "i.j=3"],
    )


def test_a_path_with_an_equals_sign_is_not_an_override():
    assert split_overrides(["runs/lr=1/config.yaml"]) == ([], ["runs/lr=1/config.yaml"])


@pytest.mark.parametrize("argv", [["--a.b"], ["--a.b", "--json"]])
def test_flag_without_value(argv):
    with pytest.raises(UsageError, match=r"--a.b has no value"):
        split_overrides(argv)
