"""What a run is told that does not fit: where, what would be there, and the cheapest way out."""

from dataclasses import replace

from ullage.config.load import load_mapping
from ullage.planner.hardware import parse_machine
from ullage.planner.model_shape import find_shape
from ullage.planner.plan import plan
from ullage.run.refusal import refusal

GIB = 2**30


def refused(model, gpu, ram=None, **memory):
    config = load_mapping({f"memory.{key}": value for key, value in memory.items()}).config
    made = plan(find_shape(model), config, replace(parse_machine(gpu), host_bytes=ram))
    assert not made.fits
    return made, refusal(made)


def test_a_device_that_is_too_small_is_told_with_what_it_would_hold():
    made, error = refused("Qwen2.5-7B", "16GiB")
    cause, planned_for, *rows = error.cause.splitlines()
    assert cause.startswith("update does not fit: it needs at least ")
    assert cause.endswith(", there are 16.0 GiB (16GiB)")
    assert planned_for == "planned for it:"
    assert {row.split()[0] for row in rows} == set(made.binding.components)
    assert "  graphs             24.0 MiB" in rows
    assert error.remedy.startswith("set ")


def test_a_host_that_is_too_small_is_told_with_what_it_would_hold():
    made, error = refused("Qwen2.5-7B", "h200", ram=4 * GIB)
    cause, _, *rows = error.cause.splitlines()
    assert cause.startswith("the run does not fit: host memory needs ")
    assert cause.endswith(", there is 4.0 GiB")
    assert {row.split()[0] for row in rows} == {name for name, count in made.host.items() if count}
    assert error.remedy.startswith("a machine with more host memory: ")


def test_where_both_are_too_small_it_is_the_device():
    """More host memory would not help."""
    _, error = refused("Llama-3.1-405B", "h200", ram=4 * GIB, budget="100GiB")
    assert error.cause.splitlines()[0].endswith(", there are 100.0 GiB (memory.budget = 100GiB)")


def test_where_nothing_helps_it_is_a_smaller_model():
    _, error = refused("DeepSeek-V3", "4060 Ti")
    assert error.remedy == "take a smaller model"
