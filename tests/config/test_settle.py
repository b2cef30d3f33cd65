"""Keys left on auto become values; keys that have one keep it."""

import pytest
from pydantic import ValidationError

from ullage.config.load import load_mapping
from ullage.config.settle import PATHS, choices_of, open_keys, plain, plainly, settled, value_of


def config_of(**given):
    return load_mapping({key.replace("__", "."): value for key, value in given.items()}).config


def test_every_choice_is_open_by_itself_and_has_a_plain_value():
    config = config_of()
    assert open_keys(config) == list(PATHS.values()) == list(plain(config, "cpu"))
    chosen = choices_of(plainly(config, "cuda"))
    assert chosen.model_dump() == {
        "optimizer_state": "device",
        "gradients": "weights",
        "offload_roles": False,
        "recompute": "full",
        "activation_offload": "none",
        "activation_share": 1.0,
        "tokens": 8192,
        "slots": 64,
    }
    assert choices_of(plainly(config, "cpu")).recompute == "none"


def test_a_pass_holds_the_longest_sequence():
    config = config_of(data__max_prompt_length=6000, data__max_response_length=6000)
    assert choices_of(plainly(config, "cpu")).tokens == 12_000


def test_given_values_stay():
    config = config_of(memory__gradients="host", memory__recompute=0.25)
    assert "memory.gradients" not in open_keys(config)
    made = settled(config, {**plain(config, "cuda"), "memory.gradients": "float32", "memory.offload_roles": True})
    chosen = choices_of(made)
    assert (chosen.gradients, chosen.recomputed_share, chosen.offload_roles) == ("host", 0.25, True)
    assert value_of(config, "memory.offload_roles") == "auto", "the config itself is as it was"


def test_what_is_left_open_has_no_choices():
    with pytest.raises(ValidationError, match="optimizer_state"):
        choices_of(config_of())


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("memory__budget", "24", "must be a size with its unit, such as 24GiB, or auto"),
        ("memory__activation_share", 1.5, "a share of the layers must lie between 0 and 1"),
    ],
)
def test_values_that_mean_nothing(key, value, rule):
    with pytest.raises(Exception, match=rule):
        config_of(**{key: value})
